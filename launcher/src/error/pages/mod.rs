//! Pages of `launcher explain`; each sentence is next to its translation.

mod data;
mod device;
mod files;
mod memory;
mod ranks;

use crate::error::ErrorCode;
use crate::lang::{Both, both};

/// Page of `launcher explain` about one code.
#[derive(Debug)]
pub(crate) struct Page {
    pub(crate) title: Both,
    pub(crate) meaning: Both,
    pub(crate) causes: &'static [Both],
    pub(crate) look_at: &'static [Both],
    pub(crate) what_to_do: &'static [Both],
    /// A report of this program as an example.
    pub(crate) example: &'static str,
}

/// The help page of the error `code`.
pub(crate) const fn page(code: ErrorCode) -> &'static Page {
    match code {
        ErrorCode::DeviceMemory => &memory::DEVICE_MEMORY,
        ErrorCode::HostMemory => &memory::HOST_MEMORY,
        ErrorCode::Plan => &memory::PLAN,
        ErrorCode::SharedMemory => &memory::SHARED_MEMORY,
        ErrorCode::Rendezvous => &ranks::RENDEZVOUS,
        ErrorCode::PortInUse => &ranks::PORT_IN_USE,
        ErrorCode::Collective => &ranks::COLLECTIVE,
        ErrorCode::Panic => &ranks::PANIC,
        ErrorCode::RankDied => &ranks::RANK_DIED,
        ErrorCode::Interrupted => &ranks::INTERRUPTED,
        ErrorCode::Numeric => &data::NUMERIC,
        ErrorCode::Samples => &data::SAMPLES,
        ErrorCode::Placeholders => &data::PLACEHOLDERS,
        ErrorCode::DataFile => &data::DATA_FILE,
        ErrorCode::Resume => &files::RESUME,
        ErrorCode::NothingToDo => &files::NOTHING_TO_DO,
        ErrorCode::Usage => &files::USAGE,
        ErrorCode::ModelFiles => &files::MODEL_FILES,
        ErrorCode::Disk => &files::DISK,
        ErrorCode::DeviceTooOld => &device::DEVICE_TOO_OLD,
        ErrorCode::Cuda => &device::CUDA,
        ErrorCode::GpuVerification => &device::VERIFICATION,
    }
}
