//! Operations as launches. Each kernel family has one file with its modules and launches.

pub mod accumulate;
pub mod adamw;
pub mod attention;
pub mod cast;
mod flat;
pub mod grad_norm;
pub mod grouped;
pub mod grouped_lora;
pub mod lora_gradients;
pub mod lora_linear;
pub mod loss;
pub mod matmul_plain;
pub mod norm;
pub mod pointwise;
pub mod primitives_check;
pub mod product;
pub mod rows;
pub mod shared_grouped_lora;
pub mod shared_lora;
pub mod step;
pub mod tile;
pub mod unpack;
pub mod workspace;
