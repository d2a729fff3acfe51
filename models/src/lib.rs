//! Vision-language models written forward-only on a tape of replayed segments, with their image and text processing.
#![forbid(unsafe_code)]

pub mod image;
pub mod minicpm;
pub mod text;
