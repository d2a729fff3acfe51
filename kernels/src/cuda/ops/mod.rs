//! One file per kernel family: which modules it has, and the launches of an operation as values.

pub mod attention;
pub mod cast;
