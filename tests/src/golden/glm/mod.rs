//! Packs of GLM-4V and GLM-4.1V.

mod glm41v;
mod glm4v;
mod greedy;
mod shared;

pub(super) use glm4v::Glm4vPacks;
pub(super) use glm41v::Glm41vPacks;
