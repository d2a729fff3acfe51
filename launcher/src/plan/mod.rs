//! Planning of a run before it starts: data check, memory of each rank by tier and phase, disk check, and the choices
//! that settings of `auto` leave open.

pub(crate) mod disk_check;
pub(crate) mod dry_run;
mod find_batch;
mod fixed;
mod machine;
pub(crate) mod memory_check;
pub(crate) mod memory_plans;
mod optimizer_overlap;
mod origin;
mod prepare;
pub(crate) mod rank_memory;
pub(crate) mod resume;
mod settle;
pub(crate) mod spill_directories;
mod stage;
pub(crate) mod stages;
pub(crate) mod suggestion;

pub(crate) use dry_run::{
    HeldOut, Work, check_kernels, dry_run, kernels_of, least_device_bytes, window_region,
};
pub(crate) use fixed::{DECODING, Fixed, WINDOW_SLACK_BYTES};
pub(crate) use machine::{DESCRIBED_CAPABILITY, DESCRIBED_MULTIPROCESSORS, Machine};
pub(crate) use memory_check::MemoryCheck;
pub(crate) use memory_plans::MemoryPlans;
pub(crate) use optimizer_overlap::{Spare, backward_line, backward_share, forward_line};
pub(crate) use prepare::{
    adapter_line, check_data, image_bytes, pixel_line, prepare, quantized_event,
};
pub(crate) use rank_memory::fixed as fixed_memory;
pub(crate) use settle::{Count, Counted, Settled, settle, settle_one_by_one};
pub(crate) use stage::stage_line;
pub use suggestion::Suggestions;
