//! Graphs: works of a stream, captured once and queued as one.
#![expect(unsafe_code, reason = "calls into the driver, which was probed before")]

use std::sync::Arc;

use cudarc::driver::{CudaContext, result, sys};

use super::error::{DriverResult, Result};
use super::gpu::Gpu;

/// Works that a GPU queues by one call. Dropped, it waits for nothing: the driver keeps what is still running.
#[derive(Debug)]
pub struct Graph {
    context: Arc<CudaContext>,
    executable: sys::CUgraphExec,
}

// SAFETY: the driver's handle may be used by any thread, by one at a time.
unsafe impl Send for Graph {}

impl Gpu {
    /// What `queue` gives to the stream, kept instead of executed. Inside, nothing may wait for the GPU.
    ///
    /// # Errors
    /// What `queue` fails with; when the driver cannot keep it. The stream is as before then.
    pub(super) fn capture<E: From<super::error::CudaError>>(
        &self,
        queue: impl FnOnce() -> Result<(), E>,
    ) -> Result<Graph, E> {
        self.bind()?;
        let stream = self.stream().cu_stream();
        // Other threads may allocate pinned memory and copy on their own streams meanwhile.
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is this GPU's and is not being captured.
        unsafe { result::stream::begin_capture(stream, mode) }.during("beginning a graph")?;
        let queued = queue();
        // SAFETY: begun above, by this thread.
        let captured = unsafe { result::stream::end_capture(stream) }.during("ending a graph");
        let captured = captured.map(Captured);
        queued?;
        let captured = captured?;
        let flags = sys::CUgraphInstantiate_flags(0);
        // SAFETY: the graph was captured above.
        let executable = unsafe { result::graph::instantiate(captured.0, flags) };
        Ok(Graph {
            context: Arc::clone(self.stream().context()),
            executable: executable.during("making a graph")?,
        })
    }

    /// Queues a graph of this GPU behind the stream's work.
    ///
    /// # Safety
    /// The memory of its works is still allocated and stays so until the stream has passed them.
    pub(super) unsafe fn replay(&self, graph: &Graph) -> Result<()> {
        self.bind()?;
        // SAFETY: graph and stream are of this GPU; the caller vouches for the memory.
        unsafe { result::graph::launch(graph.executable, self.stream().cu_stream()) }
            .during("queueing a graph")
    }
}

/// Works that were captured; what is made of them stands for itself.
struct Captured(sys::CUgraph);

impl Drop for Captured {
    fn drop(&mut self) {
        // SAFETY: captured once, destroyed once, with the GPU selected.
        let _unused_outcome = unsafe { result::graph::destroy(self.0) };
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: made once, destroyed once. A failing driver leaves nothing to do.
            let _unused_outcome = unsafe { result::graph::exec_destroy(self.executable) };
        }
    }
}
