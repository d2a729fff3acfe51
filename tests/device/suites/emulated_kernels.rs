//! Every kernel family on the emulated device.
