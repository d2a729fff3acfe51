//! CUDA graphs: commands captured from a stream and launched by one call.
#![expect(unsafe_code, reason = "calls into the driver, which was probed before")]

use std::sync::Arc;

use cudarc::driver::sys;

use super::context::Context;
use super::error::{DriverResult, Result};
use super::gpu::Gpu;

/// Executable CUDA graph of captured commands. Dropping it does not wait: the driver keeps what is still
/// running.
#[derive(Debug)]
pub struct Graph {
    context: Arc<Context>,
    executable: sys::CUgraphExec,
}

// SAFETY: the driver's handle may be used by any thread, by one at a time.
unsafe impl Send for Graph {}

impl Gpu {
    /// Captures the commands that `queue` gives to the stream, without executing them. `queue` must not wait for the
    /// GPU.
    ///
    /// # Errors
    /// Errors of `queue`, and when the driver cannot capture. The stream is unchanged then.
    pub(super) fn capture<E: From<super::error::CudaError>>(
        &self,
        queue: impl FnOnce() -> Result<(), E>,
    ) -> Result<Graph, E> {
        self.bind()?;
        let stream = self.stream().raw();
        // Other threads may meanwhile allocate pinned memory and copy on their own streams.
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is this GPU's and is not being captured.
        unsafe { self.driver().begin_capture(stream, mode) }.during("beginning a graph")?;
        let queued = queue();
        // SAFETY: begun above, by this thread.
        let captured = unsafe { self.driver().end_capture(stream) }.during("ending a graph");
        let captured = captured.map(|graph| Captured(self, graph));
        queued?;
        let captured = captured?;
        // SAFETY: the graph was captured above.
        let executable = unsafe { self.driver().instantiate(captured.1) };
        Ok(Graph {
            context: Arc::clone(self.stream().context()),
            executable: executable.during("making a graph")?,
        })
    }

    /// Launches a graph of this GPU on the compute stream.
    ///
    /// # Safety
    /// The memory of its commands stays allocated until the stream has passed them.
    pub(super) unsafe fn replay(&self, graph: &Graph) -> Result<()> {
        self.bind()?;
        // SAFETY: graph and stream are of this GPU; the caller vouches for the memory.
        unsafe {
            self.driver()
                .launch_graph(graph.executable, self.stream().raw())
        }
        .during("queueing a graph")
    }
}

/// Captured graph template. The executable graph does not depend on it.
struct Captured<'g>(&'g Gpu, sys::CUgraph);

impl Drop for Captured<'_> {
    fn drop(&mut self) {
        // SAFETY: captured once, destroyed once, with the GPU's context current.
        let _unused_outcome = unsafe { self.0.driver().destroy_graph(self.1) };
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made once, destroyed once. A failing driver leaves nothing to do.
            let _unused_outcome =
                unsafe { self.context.driver().destroy_executable(self.executable) };
        }
    }
}
