//! A call of the attention kernels: operands to the machine, results back.

use anyhow::{Context, Result, ensure};
use half::{bf16, f16};
use kernels::DType;
use kernels::cuda::device_kind::AttentionBackward;
use kernels::cuda::launch::Address;
use kernels::cuda::module::Module;
use kernels::cuda::ops::attention::{Gradients, Inputs, Outputs, Plan, Problem};

use super::exact::Values;
use crate::machine::{Buffer, Machine};
use crate::random::Operands;
use crate::reference::Attention;
use crate::tolerance;

/// Rows of NaN after the last sequence.
const TAIL: usize = 2;

/// A call without its values.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) dtype: DType,
    pub(super) shape: Attention,
    /// Number of multiprocessors for the choice of tiles.
    pub(super) multiprocessors: u32,
    pub(super) backward: AttentionBackward,
}

/// Bytes of values in a dtype.
fn encode(dtype: DType, values: &[f64]) -> Vec<u8> {
    let bytes = |value: &f64| match dtype {
        DType::BF16 => bf16::from_f32(*value as f32).to_le_bytes().to_vec(),
        DType::F16 => f16::from_f32(*value as f32).to_le_bytes().to_vec(),
        _ => (*value as f32).to_le_bytes().to_vec(),
    };
    values.iter().flat_map(bytes).collect()
}

fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let value = |x: &[u8]| match dtype {
        DType::BF16 => bf16::from_le_bytes([x[0], x[1]]).to_f64(),
        DType::F16 => f16::from_le_bytes([x[0], x[1]]).to_f64(),
        _ => f32::from_le_bytes([x[0], x[1], x[2], x[3]]).into(),
    };
    bytes.chunks_exact(dtype.size_bytes()).map(value).collect()
}

/// Results of a call, as bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Results {
    dtype: DType,
    /// `out`, `dq`, `dk`, `dv`.
    tensors: [Vec<u8>; 4],
    lse: Vec<u8>,
}

impl Results {
    pub(super) fn out(&self) -> Vec<f64> {
        decode(self.dtype, &self.tensors[0])
    }

    pub(super) fn lse(&self) -> Vec<f64> {
        decode(DType::F32, &self.lse)
    }

    /// `dq`, `dk`, `dv`.
    pub(super) fn gradients(&self) -> [Vec<f64>; 3] {
        [1, 2, 3].map(|i| decode(self.dtype, &self.tensors[i]))
    }

    /// The results of one sequence.
    pub(super) fn sequence(&self, shape: &Attention, index: usize) -> Self {
        let [q, k] = [(&shape.q_starts, shape.h), (&shape.k_starts, shape.g)];
        let cut = |bytes: &[u8], (starts, heads): (&Vec<usize>, usize), width: usize| {
            let row = heads * width;
            bytes[starts[index] * row..starts[index + 1] * row].to_vec()
        };
        let width = shape.d * self.dtype.size_bytes();
        let [out, dq, dk, dv] = &self.tensors;
        Self {
            dtype: self.dtype,
            tensors: [
                cut(out, q, width),
                cut(dq, q, width),
                cut(dk, k, width),
                cut(dv, k, width),
            ],
            lse: cut(&self.lse, q, 4),
        }
    }

    /// Fails if a byte differs.
    pub(super) fn ensure_equal(&self, other: &Self, what: &str) -> Result<()> {
        let names = ["out", "dq", "dk", "dv"]
            .into_iter()
            .zip(self.tensors.iter().zip(&other.tensors));
        let all = names.chain([("lse", (&self.lse, &other.lse))]);
        for (name, (a, b)) in all {
            let at = a.iter().zip(b).position(|(a, b)| a != b);
            ensure!(
                a.len() == b.len() && at.is_none(),
                "{what}: byte {at:?} of {name} differs"
            );
        }
        Ok(())
    }
}

impl Call {
    pub(super) fn rounding(&self) -> tolerance::Attention {
        let narrow_weights = self.plan().is_some_and(|plan| plan.uses_tensor_cores());
        tolerance::Attention {
            dtype: self.dtype,
            narrow_weights,
        }
    }

    pub(super) fn plan(&self) -> Option<Plan> {
        let shape = &self.shape;
        Plan::new(&Problem {
            dtype: self.dtype,
            heads: shape.h as u32,
            kv_heads: shape.g as u32,
            head_dim: shape.d as u32,
            q_starts: &shape.q_starts,
            k_starts: &shape.k_starts,
            causal: shape.causal,
            scale: shape.scale as f32,
            multiprocessors: self.multiprocessors,
            shared_bytes: 228 << 10,
            backward: self.backward,
        })
    }

    /// Normally distributed operands, rounded to the dtype.
    pub(super) fn draw(&self, seed: u64) -> Values {
        let shape = &self.shape;
        let (q_len, k_len) = (
            shape.queries() * shape.h * shape.d,
            shape.keys() * shape.g * shape.d,
        );
        let draw = |name, n| {
            let values = Operands::new(seed).normal(name, n, 1.0);
            let values: Vec<f64> = values.into_iter().map(f64::from).collect();
            decode(self.dtype, &encode(self.dtype, &values))
        };
        Values {
            q: draw("q", q_len),
            k: draw("k", k_len),
            v: draw("v", k_len),
            dout: draw("dout", q_len),
        }
    }

    /// Forward and backward.
    pub(super) fn run(&self, machine: &mut dyn Machine, values: &Values) -> Result<Results> {
        self.run_from(machine, values, None)
    }

    /// The same with the kernels of `module`, if one is given.
    pub(super) fn run_from(
        &self,
        machine: &mut dyn Machine,
        values: &Values,
        module: Option<&Module>,
    ) -> Result<Results> {
        let plan = self.plan().context("no plan for this call")?;
        let (q_len, k_len) = (values.q.len(), values.k.len());
        let bytes = self.dtype.size_bytes();
        let mut upload = |values: &[f64], heads: usize| -> Result<Address> {
            let data = encode(self.dtype, values);
            let tail = TAIL * heads * self.shape.d * bytes;
            let buffer = machine.allocate(data.len() + tail)?;
            machine.write(buffer, &data)?;
            Ok(buffer.address)
        };
        let (h, g) = (self.shape.h, self.shape.g);
        let [q, dout] = [upload(&values.q, h)?, upload(&values.dout, h)?];
        let [k, v] = [upload(&values.k, g)?, upload(&values.v, g)?];
        let inputs = Inputs {
            q,
            k,
            v,
            table: machine.upload(plan.table())?.address,
        };
        let out = machine.allocate(q_len * bytes)?;
        let lse = machine.allocate(self.shape.queries() * h * 4)?;
        let outputs = Outputs {
            out: out.address,
            lse: lse.address,
        };
        let [dq, dk, dv] = [q_len, k_len, k_len].map(|n| machine.allocate(n * bytes));
        let (dq, dk, dv) = (dq?, dk?, dv?);
        let workspace = machine.allocate(plan.workspace_bytes() as usize)?.address;
        let [dq_at, dk_at, dv_at] = [dq, dk, dv].map(|buffer| buffer.address);
        let gradients = Gradients {
            dout,
            dq: dq_at,
            dk: dk_at,
            dv: dv_at,
            workspace,
        };
        let backward = plan.backward(inputs, outputs, gradients);
        for mut launch in plan.forward(inputs, outputs).into_iter().chain(backward) {
            if let Some(module) = module {
                launch.module = module.clone();
            }
            machine.launch(&launch)?;
        }
        let mut bytes_of = |buffer: Buffer| machine.download::<u8>(buffer);
        Ok(Results {
            dtype: self.dtype,
            tensors: [bytes_of(out)?, bytes_of(dq)?, bytes_of(dk)?, bytes_of(dv)?],
            lse: bytes_of(lse)?,
        })
    }
}
