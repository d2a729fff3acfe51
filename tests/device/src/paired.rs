//! Two machines that execute the same launches. It measures how far the emulator is from a GPU, bit for bit.

use anyhow::{Result, bail};
use kernels::cuda::launch::{Address, Arg, Launch};
use kernels::cuda::matmul::Multiply;

use crate::machine::{Buffer, Machine};

/// Executes everything on both machines. Callers see the buffers and results of the first one.
#[derive(Debug)]
pub struct Paired<A, B> {
    first: A,
    second: B,
    buffers: Vec<(Buffer, Buffer)>,
    compared: Comparison,
}

/// Comparison of the results read.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Comparison {
    /// Bytes read.
    pub bytes: u64,
    /// Bytes that differ.
    pub different: u64,
}

impl<A: Machine, B: Machine> Paired<A, B> {
    /// Pairs two machines.
    #[must_use]
    pub const fn new(first: A, second: B) -> Self {
        let compared = Comparison {
            bytes: 0,
            different: 0,
        };
        Self {
            first,
            second,
            buffers: Vec::new(),
            compared,
        }
    }

    /// The comparison since the last call.
    pub fn take_comparison(&mut self) -> Comparison {
        std::mem::take(&mut self.compared)
    }

    fn partner(&self, buffer: Buffer) -> Result<Buffer> {
        match self.buffers.iter().find(|(first, _)| *first == buffer) {
            Some((_, second)) => Ok(*second),
            None => bail!("a buffer of another machine"),
        }
    }

    /// An argument of the first machine translated for the second.
    fn translate(&self, arg: Arg) -> Arg {
        match arg {
            Arg::Address(address) => Arg::Address(self.elsewhere(address)),
            other => other,
        }
    }

    /// The same offset in the second machine's memory.
    fn elsewhere(&self, place: Address) -> Address {
        let Address(address) = place;
        let inside = |(first, _): &&(Buffer, Buffer)| {
            let start = first.address.0;
            (start..=start + first.len as u64).contains(&address)
        };
        match self.buffers.iter().find(inside) {
            Some((first, second)) => Address(second.address.0 + (address - first.address.0)),
            None => place,
        }
    }
}

impl<A: Machine, B: Machine> Machine for Paired<A, B> {
    fn name(&self) -> String {
        format!("{} and {}", self.first.name(), self.second.name())
    }

    fn shared_limit(&self) -> u32 {
        self.first.shared_limit().min(self.second.shared_limit())
    }

    fn allocate(&mut self, len: usize) -> Result<Buffer> {
        let pair = (self.first.allocate(len)?, self.second.allocate(len)?);
        self.buffers.push(pair);
        Ok(pair.0)
    }

    fn write(&mut self, buffer: Buffer, bytes: &[u8]) -> Result<()> {
        let partner = self.partner(buffer)?;
        self.first.write(buffer, bytes)?;
        self.second.write(partner, bytes)
    }

    fn read(&mut self, buffer: Buffer, start: isize, len: usize) -> Result<Vec<u8>> {
        let partner = self.partner(buffer)?;
        let bytes = self.first.read(buffer, start, len)?;
        let other = self.second.read(partner, start, len)?;
        let different = bytes.iter().zip(&other).filter(|(a, b)| a != b).count();
        self.compared.bytes += len as u64;
        self.compared.different += different as u64;
        Ok(bytes)
    }

    fn launch(&mut self, launch: &Launch) -> Result<()> {
        let args = launch.args.iter().map(|arg| self.translate(*arg)).collect();
        let partner = Launch {
            args,
            ..launch.clone()
        };
        self.first.launch(launch)?;
        self.second.launch(&partner)
    }

    fn multiply(
        &mut self,
        product: &Multiply,
        workspace: Address,
        workspace_bytes: u64,
    ) -> Result<bool> {
        let partner = Multiply {
            a: self.elsewhere(product.a),
            b: self.elsewhere(product.b),
            y: self.elsewhere(product.y),
            bias: self.elsewhere(product.bias),
            aux: self.elsewhere(product.aux),
            ..*product
        };
        let other = self.elsewhere(workspace);
        let first = self.first.multiply(product, workspace, workspace_bytes)?;
        Ok(self.second.multiply(&partner, other, workspace_bytes)? && first)
    }

    fn reset(&mut self) -> Result<()> {
        self.buffers.clear();
        let first = self.first.reset();
        first.and(self.second.reset())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::{self, Effort};
    use crate::emulator::{Emulator, Order};
    use kernels::cuda::module::Family;

    #[test]
    fn two_emulators_agree_and_a_difference_is_counted() {
        let [a, b] = Order::BOTH.map(Emulator::new);
        let mut pair = Paired::new(a, b);
        for case in cases::of(Family::Cast, Effort::Emulated) {
            case.run(&mut pair).unwrap();
        }
        let equal = pair.take_comparison();
        assert!(equal.bytes > 0 && equal.different == 0, "{equal:?}");
        let buffer = pair.allocate(4).unwrap();
        let partner = pair.partner(buffer).unwrap();
        pair.second.write(partner, &[1, 255, 2]).unwrap();
        pair.read(buffer, 0, 4).unwrap();
        assert_eq!(
            pair.take_comparison(),
            Comparison {
                bytes: 4,
                different: 2
            }
        );
    }
}
