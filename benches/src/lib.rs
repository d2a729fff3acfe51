//! Cases shared by the criterion groups.
