//! A GPU as an executor: its driver's calls, on one stream for work and one each for copies in and out.

use super::graphs::{Graphs, Work, queue_one};
use super::{Cause, Executor, GroupExecutor, Moment, PeerExecutor};
use crate::cuda::error::DriverResult;
use crate::cuda::gpu::Gpu;
use crate::cuda::graph::Graph;
use crate::cuda::launch::{Address, Launch};
use crate::cuda::matmul::Multiply;
use crate::timeline::{DeviceLane, DeviceSpan};
use cudarc::driver::{CudaEvent, result};
use std::sync::Arc;

fn event(moment: &Moment) -> Result<&CudaEvent, Cause> {
    let event = moment.downcast_ref::<CudaEvent>();
    event.ok_or_else(|| "a moment of another device".into())
}

// SAFETY: memory stays until `free`, which waits for the device; work goes to one stream, in the order of calls, and
// that stream waits for each upload before it goes on.
unsafe impl Executor for Gpu {
    fn multiprocessors(&self) -> u32 {
        self.facts().multiprocessors
    }

    fn allocate(&self, bytes: u64) -> Result<Address, Cause> {
        self.bind()?;
        // SAFETY: the size is not zero.
        let memory = unsafe { result::malloc_sync((bytes as usize).max(1)) };
        Ok(Address(
            memory.during(format!("allocating {bytes} bytes on the GPU"))?,
        ))
    }

    fn free(&self, memory: Address) {
        if self.bind().is_ok() {
            // SAFETY: allocated above, freed once. A failing driver leaves nothing to do.
            let _unused_outcome = unsafe { result::free_sync(memory.0) };
        }
    }

    unsafe fn write(&self, to: Address, bytes: &[u8]) -> Result<(), Cause> {
        let copies = self.copies()?;
        // SAFETY: the caller vouches for the range.
        Ok(unsafe { copies.small.send(self, self.stream(), to, bytes) }?)
    }

    unsafe fn read(&self, from: Address, bytes: &mut [u8]) -> Result<(), Cause> {
        let behind = self.moment()?;
        // SAFETY: the caller vouches for the range; the moment is behind everything queued.
        unsafe { self.fetch(from, bytes, &behind) }
    }

    unsafe fn zero(&self, at: Address, bytes: u64) -> Result<(), Cause> {
        self.bind()?;
        let stream = self.stream().cu_stream();
        // SAFETY: the caller vouches for the range.
        unsafe { result::memset_d8_async(at.0, 0, bytes as usize, stream) }
            .during("clearing memory")?;
        Ok(())
    }

    unsafe fn copy(&self, from: Address, to: Address, bytes: u64) -> Result<(), Cause> {
        self.bind()?;
        let stream = self.stream().cu_stream();
        // SAFETY: the caller vouches for both ranges.
        unsafe { result::memcpy_dtod_async(to.0, from.0, bytes as usize, stream) }
            .during("copying on the GPU")?;
        Ok(())
    }

    fn moment(&self) -> Result<Moment, Cause> {
        let moment = self.stream().record_event(None);
        Ok(Arc::new(moment.during("marking a moment")?))
    }

    unsafe fn upload(
        &self,
        to: Address,
        bytes: &[u8],
        behind: Option<&Moment>,
    ) -> Result<(), Cause> {
        let copies = self.copies()?;
        if let Some(behind) = behind {
            self.wait_inward(behind)?;
        }
        let began = self.timeline.stamp(&copies.inward)?;
        // SAFETY: the caller vouches for the range and for the moment.
        unsafe { copies.large.send(self, &copies.inward, to, bytes) }?;
        self.timeline
            .end(DeviceLane::Inward, began, &copies.inward)?;
        self.wait_for_inward()
    }

    unsafe fn fetch(&self, from: Address, bytes: &mut [u8], behind: &Moment) -> Result<(), Cause> {
        let copies = self.copies()?;
        let wait = copies.outward.wait(event(behind)?);
        wait.during("ordering a copy behind a moment")?;
        let began = self.timeline.stamp(&copies.outward)?;
        // SAFETY: the caller vouches for the range and for the moment.
        unsafe { copies.back.receive(self, &copies.outward, from, bytes) }?;
        Ok(self
            .timeline
            .end(DeviceLane::Outward, began, &copies.outward)?)
    }

    fn measure(&self, on: bool) -> Result<(), Cause> {
        self.bind()?;
        Ok(self.timeline.measure(on, self.stream())?)
    }

    fn label(&self, label: Option<u32>) -> Result<(), Cause> {
        self.bind()?;
        Ok(self.timeline.label(label, self.stream())?)
    }

    fn measured(&self) -> Result<Vec<DeviceSpan>, Cause> {
        self.bind()?;
        Ok(self.timeline.take(self.stream())?)
    }

    unsafe fn launch(&self, launch: &Launch) -> Result<(), Cause> {
        // SAFETY: the caller vouches for the addresses, whose memory stays until the arena is dropped.
        Ok(unsafe { Self::launch(self, launch) }?)
    }

    fn multiplies(&self) -> bool {
        self.products().is_some()
    }

    unsafe fn multiply(
        &self,
        product: &Multiply,
        workspace: Address,
        workspace_bytes: u64,
    ) -> Result<bool, Cause> {
        let Some(library) = self.products() else {
            return Ok(false);
        };
        // SAFETY: the caller vouches for the addresses, whose memory stays until the arena is dropped.
        Ok(unsafe { library.multiply(self, product, workspace, workspace_bytes) }?)
    }

    fn peers(&self) -> Option<&dyn PeerExecutor> {
        Some(self)
    }

    fn group(&self) -> Option<&dyn GroupExecutor> {
        Some(self)
    }
}

impl Gpu {
    /// Copies in go on behind the moment.
    pub(in crate::cuda) fn wait_inward(&self, moment: &Moment) -> Result<(), Cause> {
        let wait = self.copies()?.inward.wait(event(moment)?);
        Ok(wait.during("ordering a copy behind a moment")?)
    }

    /// Work goes on behind all copies in.
    pub(in crate::cuda) fn wait_for_inward(&self) -> Result<(), Cause> {
        let done = self.copies()?.inward.record_event(None);
        let done = done.during("marking a moment")?;
        let waits = self.timeline.stamp(self.stream())?;
        let wait = self.stream().wait(&done);
        wait.during("ordering work behind a copy")?;
        Ok(self.timeline.end(DeviceLane::Wait, waits, self.stream())?)
    }
}

// SAFETY: a captured stream keeps the order of its works, and a graph is queued on that stream.
unsafe impl Graphs for Gpu {
    type Graph = Graph;

    unsafe fn keep(&self, works: &[Work]) -> Result<Graph, Cause> {
        self.capture(|| {
            // SAFETY: the caller vouches for the works.
            works
                .iter()
                .try_for_each(|work| unsafe { queue_one(self, work) })
        })
    }

    unsafe fn replay(&self, graph: &Graph) -> Result<(), Cause> {
        // SAFETY: the caller vouches for the memory.
        Ok(unsafe { Self::replay(self, graph) }?)
    }
}
