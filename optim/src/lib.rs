//! Update rules on flat windows, learning-rate schedules and parameter groups. Knows nothing of ranks.
#![forbid(unsafe_code)]
