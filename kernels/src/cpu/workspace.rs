//! Workspace of each operation in f32 elements, for the meta device.

pub(crate) use super::attention::{backward_space as attention_backward, space as attention};
pub(crate) use super::gemm::part_step;
pub(crate) use super::linear::{
    column_sum_space as column_sum, lora_backward_space as lora_backward, lora_space as lora,
    matmul_part_space as matmul_part, matmul_space as matmul,
};
pub(crate) use super::loss::space as loss;
pub(crate) use super::norm::{backward_space as norm_backward, space as norm};
