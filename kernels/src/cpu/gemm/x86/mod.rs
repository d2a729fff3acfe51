//! Kernels of x86-64.

pub(super) mod amx;
pub(super) mod avx2;
pub(super) mod avx512;
pub(super) mod grouped;
pub(super) mod pairs;
pub(super) mod row;
pub(super) mod square;
