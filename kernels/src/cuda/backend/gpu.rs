//! A GPU as an executor: driver calls on one stream for computation, one for copies in, two for copies out, and one
//! for communication.

use super::graphs::{Command, Graphs, queue_one};
use super::{Cause, Event, Executor, GroupExecutor, PeerExecutor, Take, Upload, filling};
use crate::cuda::context::{self, Stream};
use crate::cuda::device_kind::DeviceKind;
use crate::cuda::error::DriverResult;
use crate::cuda::gpu::Gpu;
use crate::cuda::graph::Graph;
use crate::cuda::launch::{Address, Launch};
use crate::cuda::matmul::Multiply;
use crate::cuda::module::Module;
use crate::timeline::{DeviceLane, DeviceSpan};
use std::sync::Arc;

/// Downcasts an event to this driver's type.
pub(in crate::cuda) fn cuda_event(event: &Event) -> Result<&context::Event, Cause> {
    let cuda_event = event.downcast_ref::<context::Event>();
    cuda_event.ok_or_else(|| "an event of another device".into())
}

// SAFETY: memory stays until `free`, which waits for the device. Work goes to one stream, in the order of calls, and
// that stream waits for each upload before it continues.
unsafe impl Executor for Gpu {
    fn kind(&self) -> DeviceKind {
        let facts = self.facts();
        DeviceKind {
            multiprocessors: facts.multiprocessors,
            compute_capability: Some(facts.compute_capability),
            has_library: self.products().is_some(),
            attention_backward: self.attention_backward(),
        }
    }

    fn allocate(&self, bytes: u64) -> Result<Address, Cause> {
        // Creates streams and pinned chunks now, so no step allocates them.
        self.copies()?;
        let memory = self.driver().allocate((bytes as usize).max(1));
        Ok(Address(
            memory.during(format!("allocating {bytes} bytes on the GPU"))?,
        ))
    }

    fn free(&self, memory: Address) {
        let passed = |stream: &Stream| {
            event(stream).is_ok_and(|done| self.group_state().wait(&done).is_ok())
        };
        // The driver would wait forever for work that depends on a dead rank. The process group's own wait ends and
        // ends the communicator. Memory that is still in use then is left to the end of the process.
        let all = passed(self.stream()) && self.communication().is_none_or(passed);
        if all && self.bind().is_ok() {
            // SAFETY: allocated above, freed once. A failing driver leaves nothing to do.
            let _unused_outcome = unsafe { self.driver().free(memory.0) };
        }
        if !all {
            self.abandon_others();
        }
    }

    fn compile_ahead(&self, modules: &[Module]) {
        self.images().compile_ahead(modules);
    }

    fn abandon(&self) {
        self.abandon_others();
    }

    fn await_write(&self, bytes: u64) -> Result<(), Cause> {
        Ok(self.copies()?.small.await_chunks(self, bytes)?)
    }

    unsafe fn write(&self, to: Address, bytes: &[u8]) -> Result<(), Cause> {
        let copies = self.copies()?;
        // SAFETY: the caller vouches for the range.
        Ok(unsafe { copies.small.send(self, self.stream(), to, bytes) }?)
    }

    unsafe fn read(&self, from: Address, bytes: &mut [u8]) -> Result<(), Cause> {
        let behind = self.record_event()?;
        // SAFETY: the caller vouches for the range; the event follows everything queued.
        unsafe { self.fetch(from, bytes.len() as u64, &behind, &mut filling(bytes)) }
    }

    unsafe fn zero(&self, at: Address, bytes: u64) -> Result<(), Cause> {
        self.bind()?;
        let stream = self.stream().raw();
        // SAFETY: the caller vouches for the range.
        unsafe { self.driver().fill(at.0, 0, bytes as usize, stream) }.during("clearing memory")?;
        Ok(())
    }

    unsafe fn copy(&self, from: Address, to: Address, bytes: u64) -> Result<(), Cause> {
        self.bind()?;
        let stream = self.stream().raw();
        // SAFETY: the caller vouches for both ranges.
        unsafe { self.driver().copy(to.0, from.0, bytes as usize, stream) }
            .during("copying on the GPU")?;
        Ok(())
    }

    fn record_event(&self) -> Result<Event, Cause> {
        Ok(Arc::new(self.stream().awaited_event()?))
    }

    unsafe fn upload(&self, uploads: &[Upload<'_>]) -> Result<(), Cause> {
        if uploads.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller vouches for the ranges and for the events.
        unsafe { self.copy_in(uploads) }?;
        self.work_behind(&self.copies()?.inward)
    }

    unsafe fn deliver(&self, to: Address, bytes: &[u8], behind: &Event) -> Result<(), Cause> {
        let behind = Some(behind.clone());
        // SAFETY: the caller vouches for the range and for the event.
        unsafe { self.copy_in(&[Upload { to, bytes, behind }]) }
    }

    unsafe fn register(&self, bytes: &[u8]) -> Result<bool, Cause> {
        if self.registers() {
            // SAFETY: the caller keeps the bytes.
            unsafe { self.copies()?.registered.add(self, bytes) }?;
        }
        Ok(self.registers())
    }

    fn unregister(&self, bytes: &[u8]) -> bool {
        let Ok(copies) = self.copies() else {
            return false;
        };
        copies.registered.forget(bytes);
        let passed = event(&copies.inward).is_ok_and(|done| self.group_state().wait(&done).is_ok());
        if passed && self.bind().is_ok() {
            // SAFETY: all copies from it are done, and no later one reads it in place. A failing driver leaves nothing to do.
            let _unused_outcome = unsafe { self.driver().unregister_host(bytes) };
        }
        passed
    }

    fn delivered(&self) -> Result<Event, Cause> {
        let inward = &self.copies()?.inward;
        let done = event(inward)?;
        self.work_behind(inward)?;
        Ok(Arc::new(done))
    }

    unsafe fn fetch(
        &self,
        from: Address,
        bytes: u64,
        behind: &Event,
        take: &mut Take<'_>,
    ) -> Result<(), Cause> {
        self.bind()?;
        let (ring, stream) = self.copies()?.outgoing(bytes);
        // Only this thread waits for the computation: the ring and the stream are free for other copies meanwhile.
        self.group_state().wait(cuda_event(behind)?)?;
        let began = self.timeline.stamp(stream)?;
        // SAFETY: the caller vouches for the range and for the event, which has come.
        unsafe { ring.receive(self, stream, from, bytes, take) }?;
        let lane = DeviceLane::Outward;
        Ok(self.timeline.end(lane, began, stream, bytes)?)
    }

    fn measure(&self, on: bool) -> Result<(), Cause> {
        self.bind()?;
        Ok(self
            .timeline
            .measure(on, self.stream(), self.group_state())?)
    }

    fn label(&self, label: Option<u32>) -> Result<(), Cause> {
        self.bind()?;
        Ok(self.timeline.label(label, self.stream())?)
    }

    fn measured(&self) -> Result<Vec<DeviceSpan>, Cause> {
        self.bind()?;
        Ok(self.timeline.take(self.stream(), self.group_state())?)
    }

    unsafe fn launch(&self, launch: &Launch) -> Result<(), Cause> {
        // SAFETY: the caller vouches for the addresses, whose memory stays until the arena is dropped.
        Ok(unsafe { Self::launch(self, launch) }?)
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

/// Makes `stream` wait for `cuda_event`.
pub(in crate::cuda) fn order(stream: &Stream, cuda_event: &context::Event) -> Result<(), Cause> {
    Ok(stream
        .wait(cuda_event)
        .during("ordering streams of the GPU")?)
}

/// Records an event after everything queued on `stream`.
pub(in crate::cuda) fn event(stream: &Stream) -> Result<context::Event, Cause> {
    Ok(stream.event()?)
}

impl Gpu {
    /// Copies host bytes to the device, on the host-to-device stream, each after its event.
    ///
    /// # Safety
    /// The ranges are in memory of this GPU, and after its event nothing else uses a range until the stream has passed.
    pub(in crate::cuda) unsafe fn copy_in(&self, uploads: &[Upload<'_>]) -> Result<(), Cause> {
        let copies = self.copies()?;
        let mut small = copies.small_weights();
        let mut last: Option<&Event> = None;
        for Upload { to, bytes, behind } in uploads {
            let new = behind.as_ref();
            let new = new.filter(|new| last.is_none_or(|last| !Arc::ptr_eq(last, new)));
            if let Some(new) = new {
                order(&copies.inward, cuda_event(new)?)?;
                last = Some(new);
            }
            let began = self.timeline.stamp(&copies.inward)?;
            // SAFETY: the caller vouches for the range.
            unsafe { copies.send(self, &mut small, *to, bytes) }?;
            let (lane, count) = (DeviceLane::Inward, bytes.len() as u64);
            self.timeline.end(lane, began, &copies.inward, count)?;
        }
        Ok(small.end(&copies.inward)?)
    }

    /// Makes computation wait for everything queued on `stream`.
    pub(in crate::cuda) fn work_behind(&self, stream: &Stream) -> Result<(), Cause> {
        let done = event(stream)?;
        let waits = self.timeline.stamp(self.stream())?;
        order(self.stream(), &done)?;
        let lane = DeviceLane::Wait;
        Ok(self.timeline.end(lane, waits, self.stream(), 0)?)
    }
}

// SAFETY: a captured stream keeps the order of its commands, and a graph is launched on that stream.
unsafe impl Graphs for Gpu {
    type Graph = Graph;

    unsafe fn keep(&self, commands: &[Command]) -> Result<Graph, Cause> {
        self.capture(|| {
            // SAFETY: the caller vouches for the commands.
            commands
                .iter()
                .try_for_each(|command| unsafe { queue_one(self, command) })
        })
    }

    unsafe fn replay(&self, graph: &Graph) -> Result<(), Cause> {
        // SAFETY: the caller vouches for the memory.
        Ok(unsafe { Self::replay(self, graph) }?)
    }
}
