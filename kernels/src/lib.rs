//! Tensors, an accounted memory pool and the coarse operations of vision-language models on one device.
