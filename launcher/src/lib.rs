//! Command line, rank supervisor, data loading, training loop and reports.
#![forbid(unsafe_code)]
