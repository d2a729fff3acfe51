//! A CPU that executes launches: the kernel's source compiled as C++ with emulated primitives.
