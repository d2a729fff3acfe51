//! Model states resident in the arena and changed in place, in queue order.

use super::{CudaBackend, Upload, filling};
use crate::cuda::launch::{Address, Launch};
use crate::cuda::ops::{accumulate, adamw, grad_norm, pointwise};
use crate::error::{KernelError, Result, shape_error};
use crate::pool::Tag;
use crate::resident::{
    AdamWArgs, Form, Part, Resident, ResidentAccess, RoundingCounter, Scalars, fits,
};
use crate::{DType, Tensor};
use std::ops::Range;
use std::sync::PoisonError;

impl CudaBackend {
    /// Queues a launch that rounds by the key and time stored at an address. They overwrite the previous ones, after
    /// the launches that read those. This happens once per micro-batch.
    fn run_rounding(
        &self,
        op: &'static str,
        place: RoundingCounter,
        launch: impl FnOnce(Address) -> Launch,
    ) -> Result<()> {
        let mut rounding = self.rounding.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((last, at)) = rounding.as_mut() else {
            return shape_error(op, "no states were taken");
        };
        let when = accumulate::when(place);
        if *last != when {
            self.write(op, at, bytemuck::cast_slice(&when))?;
            *last = when;
        }
        // Nothing else writes there before the launch is queued.
        self.run(op, [launch(self.address(op, at)?)])
    }

    /// Address of the bytes `at..at + len`.
    fn bytes_of(&self, op: &'static str, x: &Resident, at: usize, len: usize) -> Result<Address> {
        if at + len > x.size_bytes() {
            return shape_error(op, format!("bytes {at}..{} of {x:?}", at + len));
        }
        let start = self.address(op, &x.part(0..x.elems())?)?;
        Ok(Address(start.0 + at as u64))
    }
}

impl ResidentAccess for CudaBackend {
    fn zeros(&self, elems: usize, dtype: DType, tag: Tag) -> Result<Resident> {
        const OP: &str = "resident zeros";
        let mut rounding = self.rounding.lock().unwrap_or_else(PoisonError::into_inner);
        if rounding.is_none() {
            let place = self.uninit([4], DType::F32, Tag::Workspace)?;
            self.zero(OP, &place)?;
            *rounding = Some(([0; 4], place));
        }
        drop(rounding);
        let all = self.uninit([elems], dtype, tag)?;
        self.zero(OP, &all)?;
        Ok(Resident::new(all))
    }

    fn read(&self, from: &Resident, at: usize, out: &mut [u8]) -> Result<()> {
        const OP: &str = "read states";
        if out.is_empty() {
            return Ok(());
        }
        let written = from.borrowed().or(from.written()).cloned();
        let from = self.bytes_of(OP, from, at, out.len())?;
        let behind = match written {
            Some(behind) => behind,
            None => self
                .executor
                .record_event()
                .map_err(Self::device_error(OP))?,
        };
        // SAFETY: the range is that of the state, which is borrowed. A change drops the event of the change before.
        let fetched = unsafe {
            let bytes = out.len() as u64;
            self.executor.fetch(from, bytes, &behind, &mut filling(out))
        };
        fetched.map_err(Self::device_error(OP))
    }

    fn write(&self, to: &mut Resident, at: usize, bytes: &[u8]) -> Result<()> {
        const OP: &str = "write states";
        if bytes.is_empty() {
            return Ok(());
        }
        if let Some(behind) = to.borrowed().cloned() {
            let to = self.bytes_of(OP, to, at, bytes.len())?;
            // SAFETY: the range is that of the state, which nothing else uses while it is borrowed from the device.
            let delivered = unsafe { self.executor.deliver(to, bytes, &behind) };
            return delivered.map_err(Self::device_error(OP));
        }
        to.changes(OP)?;
        let to = self.bytes_of(OP, to, at, bytes.len())?;
        let behind = self
            .executor
            .record_event()
            .map_err(Self::device_error(OP))?;
        let behind = Some(behind);
        let upload = Upload { to, bytes, behind };
        // SAFETY: the range is that of the state, which this call borrows mutably. So nothing queued between the
        // event and this call uses it.
        let uploaded = unsafe { self.executor.upload(&[upload]) };
        uploaded.map_err(Self::device_error(OP))
    }

    fn clear(&self, of: &mut Resident, range: Range<usize>) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        const OP: &str = "clear states";
        of.changes(OP)?;
        self.zero(OP, &of.part(range)?)
    }

    fn add(
        &self,
        sums: Part<'_>,
        values: &Tensor,
        place: Option<RoundingCounter>,
        fresh: bool,
    ) -> Result<()> {
        const OP: &str = "add to sums";
        let n = values.elems();
        sums.of.changes(OP)?;
        let sums = sums.tensor(n)?;
        fits(OP, values, DType::F32, n)?;
        let (to, from) = (self.address(OP, &sums)?, self.address(OP, values)?);
        match (sums.dtype(), place) {
            (DType::F32, None) if fresh => {
                // SAFETY: both have as many bytes, and gradients are never inside the sums.
                let copied = unsafe { self.executor.copy(from, to, 4 * n as u64) };
                self.counted(OP, copied)
            }
            (DType::F32, None) => {
                let launch = pointwise::add(DType::F32, to, from, to, n as u64);
                self.run_some(OP, launch.map(|launch| [launch]))
            }
            (DType::BF16, Some(place)) => {
                let first = place.first_element;
                self.run_rounding(OP, place, |when| {
                    accumulate::launch(to, from, n as u64, (first, when), fresh)
                })
            }
            (dtype, place) => shape_error(OP, format!("{dtype} sums, rounded at {place:?}")),
        }
    }

    fn record_write(&self, states: &mut [&mut Resident]) -> Result<()> {
        let now = self.executor.record_event();
        let now = now.map_err(Self::device_error("settle states"))?;
        states
            .iter_mut()
            .for_each(|states| states.record_write(&now));
        Ok(())
    }

    fn lend(&self, states: &mut [&mut Resident]) -> Result<()> {
        const OP: &str = "lend states";
        if states.is_empty() {
            return Ok(());
        }
        let now = self
            .executor
            .record_event()
            .map_err(Self::device_error(OP))?;
        for states in states {
            // If a state is borrowed a second time, nothing was read in between.
            if states.borrowed().is_none() {
                states.changes(OP)?;
            }
            states.lend(&now);
        }
        Ok(())
    }

    fn give_back(&self, states: &mut [&mut Resident]) -> Result<()> {
        if states.is_empty() {
            return Ok(());
        }
        let delivered = self.executor.delivered();
        let delivered = delivered.map_err(Self::device_error("take states back"))?;
        states.iter_mut().for_each(|s| s.give_back(&delivered));
        Ok(())
    }

    fn square_sums(&self, of: &[Tensor]) -> Result<Vec<f64>> {
        const OP: &str = "squares of gradients";
        if of.is_empty() {
            return Ok(Vec::new());
        }
        let sums = self.scratch(8 * of.len() as u64)?;
        let start = self.address(OP, &sums)?;
        let longest = of.iter().map(Tensor::elems).max().unwrap_or(0);
        let blocks = self.scratch(grad_norm::workspace_bytes(longest as u64))?;
        let blocks = self.address(OP, &blocks)?;
        for (i, x) in of.iter().enumerate() {
            let (at, sum) = (self.address(OP, x)?, Address(start.0 + 8 * i as u64));
            let n = x.elems() as u64;
            let launches = grad_norm::square_sum(x.dtype(), at, n, blocks, sum, false);
            self.run_some(OP, launches)?;
        }
        let mut out = vec![0.0; of.len()];
        if self.executor.has_values() {
            // SAFETY: the scratch memory has as many bytes.
            let read = unsafe {
                self.executor
                    .read(start, bytemuck::cast_slice_mut(&mut out))
            };
            read.map_err(Self::device_error(OP))?;
        }
        Ok(out)
    }

    fn adamw(&self, mut args: AdamWArgs<'_>) -> Result<()> {
        const OP: &str = "AdamW";
        let (form, n) = (args.form, args.grad.elems());
        let changed = [&mut args.weight, &mut args.exp_avg, &mut args.exp_avg_sq];
        let absmax = args.absmax.iter_mut().flatten();
        for part in changed.into_iter().chain(&mut args.copy).chain(absmax) {
            part.of.changes(OP)?;
        }
        let address = |x: &Tensor, dtype| {
            fits(OP, x, dtype, n)?;
            self.address(OP, x)
        };
        let copy = match (form.copy(), &args.copy) {
            (Some(dtype), Some(copy)) => address(&copy.tensor(n)?, dtype)?,
            (None, None) => Address::NULL,
            _ => return shape_error(OP, format!("{form:?} with the copy {:?}", args.copy)),
        };
        let absmax = match (form.moment_dtype(), &args.absmax) {
            (DType::U8, Some([m, v])) => {
                let blocks = n.div_ceil(Form::BLOCK_ELEMS);
                let address = |part: &Part<'_>| {
                    let x = part.tensor(blocks)?;
                    fits(OP, &x, DType::F32, blocks)?;
                    self.address(OP, &x)
                };
                [address(m)?, address(v)?]
            }
            (DType::F32 | DType::BF16, None) => [Address::NULL; 2],
            _ => return shape_error(OP, format!("{form:?} with the absmax {:?}", args.absmax)),
        };
        let chunk = adamw::AdamWChunk {
            form,
            grad_dtype: args.grad.dtype(),
            grad: self.address(OP, args.grad)?,
            weight: address(&args.weight.tensor(n)?, form.weight())?,
            copy,
            exp_avg: address(&args.exp_avg.tensor(n)?, form.moment_dtype())?,
            exp_avg_sq: address(&args.exp_avg_sq.tensor(n)?, form.moment_dtype())?,
            absmax,
            n: n as u64,
            first_element: args.first_element,
        };
        let (table, index) = args.scalars;
        let size = size_of::<Scalars>();
        let scalars = self.bytes_of(OP, table, index * size, size)?;
        let launch = adamw::launch(&chunk, scalars, Address::NULL);
        match launch {
            Some(launch) => self.run(OP, [launch]),
            None => Err(KernelError::Shape {
                op: OP,
                detail: format!("a gradient of {}", args.grad.dtype()),
            }),
        }
    }
}
