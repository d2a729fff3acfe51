//! Context, streams and events of one GPU. Dropping one releases it; an error while releasing leaves nothing to do.
#![expect(unsafe_code, reason = "calls into the driver, which was found before")]

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUevent, CUevent_flags, CUstream,
};

use super::driver::{Answer, Driver};
use super::error::{DriverResult, Result};

/// Primary context of one GPU, and the driver that it belongs to.
#[derive(Debug)]
pub struct Context {
    driver: Driver,
    device: CUdevice,
    raw: CUcontext,
}

// SAFETY: a context is a plain identifier; any thread may make it current.
unsafe impl Send for Context {}
// SAFETY: as above; the driver orders calls on it.
unsafe impl Sync for Context {}

impl Context {
    /// Opens the context of the GPU `ordinal` and makes it current on this thread.
    pub(super) fn open(driver: Driver, ordinal: u32) -> Answer<Arc<Self>> {
        driver.init()?;
        let device = driver.device(ordinal as i32)?;
        let raw = driver.retain(device)?;
        let context = Self {
            driver,
            device,
            raw,
        };
        context.bind()?;
        Ok(Arc::new(context))
    }

    /// Functions of the driver that the context belongs to.
    pub(super) const fn driver(&self) -> &Driver {
        &self.driver
    }

    /// Makes the context current on this thread.
    pub(super) fn bind(&self) -> Answer<()> {
        if self.driver.current()? == self.raw {
            return Ok(());
        }
        // SAFETY: the context is alive.
        unsafe { self.driver.set_current(self.raw) }
    }

    pub(super) fn attribute(&self, which: CUdevice_attribute) -> Answer<i32> {
        self.driver.attribute(self.device, which)
    }

    pub(super) fn stream(self: &Arc<Self>) -> Answer<Arc<Stream>> {
        self.bind()?;
        Ok(Arc::new(Stream {
            raw: self.driver.stream()?,
            context: self.clone(),
        }))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.bind().is_ok() {
            // SAFETY: retained once; streams and events hold the context, so none is left.
            let _unused_outcome = unsafe { self.driver.release(self.device) };
        }
    }
}

/// Stream of one GPU: commands run in the order in which they were queued.
#[derive(Debug)]
pub struct Stream {
    raw: CUstream,
    context: Arc<Context>,
}

// SAFETY: a stream is a plain identifier that any thread may use.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver orders calls on it.
unsafe impl Sync for Stream {}

impl Stream {
    pub(super) const fn raw(&self) -> CUstream {
        self.raw
    }

    /// The stream as other libraries take it (`cudaStream_t`).
    pub(super) const fn handle(&self) -> *mut c_void {
        self.raw.cast()
    }

    pub(super) const fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Waits until everything queued is done.
    pub(super) fn synchronize(&self) -> Answer<()> {
        self.context.bind()?;
        // SAFETY: the stream is alive.
        unsafe { self.context.driver.synchronize_stream(self.raw) }
    }

    /// A new event after everything queued, without a time.
    pub(super) fn event(&self) -> Result<Event> {
        self.recorded(CUevent_flags::CU_EVENT_DISABLE_TIMING as u32)
    }

    /// A new event after everything queued, for which a host thread may wait. The thread sleeps meanwhile: other
    /// threads compute.
    pub(super) fn awaited_event(&self) -> Result<Event> {
        let sleeps = CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32;
        self.recorded(sleeps | CUevent_flags::CU_EVENT_DISABLE_TIMING as u32)
    }

    /// A new event after everything queued, with the time at which the stream reaches it.
    pub(super) fn timed_event(&self) -> Result<Event> {
        self.recorded(CUevent_flags::CU_EVENT_DEFAULT as u32)
    }

    fn recorded(&self, flags: u32) -> Result<Event> {
        let record = || {
            self.context.bind()?;
            let event = Event {
                raw: self.context.driver.event(flags)?,
                context: self.context.clone(),
            };
            // SAFETY: event and stream are alive and of one context.
            unsafe { self.context.driver.record(event.raw, self.raw) }?;
            Ok(event)
        };
        record().during("recording an event")
    }

    /// Makes what is queued from here on wait for `event`.
    pub(super) fn wait(&self, event: &Event) -> Answer<()> {
        self.context.bind()?;
        // SAFETY: stream and event are alive.
        unsafe { self.context.driver.wait(self.raw, event.raw) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: created once, destroyed once. The driver keeps what is still running.
            let _unused_outcome = unsafe { self.context.driver.destroy_stream(self.raw) };
        }
    }
}

/// Recorded event.
#[derive(Debug)]
pub(super) struct Event {
    raw: CUevent,
    context: Arc<Context>,
}

// SAFETY: an event is a plain identifier that any thread may use.
unsafe impl Send for Event {}
// SAFETY: as above; the driver orders calls on it.
unsafe impl Sync for Event {}

impl Event {
    /// Waits until the work before the event is done.
    pub(super) fn synchronize(&self) -> Answer<()> {
        self.context.bind()?;
        // SAFETY: the event is alive.
        unsafe { self.context.driver.synchronize_event(self.raw) }
    }

    /// Whether the work before the event is done.
    pub(super) fn is_done(&self) -> Answer<bool> {
        self.context.bind()?;
        // SAFETY: the event is alive.
        unsafe { self.context.driver.is_done(self.raw) }
    }

    /// Milliseconds from this event to a later one. Waits for both, which must have a time.
    pub(super) fn milliseconds_to(&self, later: &Self) -> Answer<f32> {
        self.synchronize()?;
        later.synchronize()?;
        // SAFETY: both events are alive.
        unsafe { self.context.driver.milliseconds(self.raw, later.raw) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: created once, destroyed once.
            let _unused_outcome = unsafe { self.context.driver.destroy_event(self.raw) };
        }
    }
}
