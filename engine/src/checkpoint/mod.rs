//! Logical, atomic, hashed checkpoints.
