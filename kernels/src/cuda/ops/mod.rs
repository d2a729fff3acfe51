//! One file per kernel family: which modules it has, and the launches of an operation as values.

pub mod adamw;
pub mod attention;
pub mod cast;
pub mod grad_norm;
pub mod lora_linear;
pub mod matmul_plain;
pub mod norm;
pub mod primitives_check;
pub mod product;
pub mod tile;
pub mod workspace;
