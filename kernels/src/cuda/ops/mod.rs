//! One file per kernel family: which modules it has, and the launches of an operation as values.

pub mod cast;
pub mod lora_linear;
pub mod matmul_plain;
pub mod primitives_check;
pub mod product;
pub mod tile;
pub mod workspace;
