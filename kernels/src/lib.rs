//! Tensors, an accounted memory pool and the coarse operations of vision-language models on one device.
#![deny(unsafe_code)]

mod dtype;

pub use dtype::{DType, Element, Float};
