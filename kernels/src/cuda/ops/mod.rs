//! One file per kernel family: which modules it has, and the launches of an operation as values.

pub mod adamw;
pub mod cast;
pub mod grad_norm;
pub mod norm;
pub mod primitives_check;
