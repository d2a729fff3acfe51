//! Static model of kernels, without a GPU: resident blocks of each kernel on each kind of card, and the share of the
//! tensor cores' peak that its main loop can reach.
//!
//! - **Resident blocks** follow from registers, threads and shared memory, as CUDA's occupancy calculator counts them.
//! - **Instructions per mma**: of the machine code's loop with the most `mma`, all paths of it. Boundary tiles and
//!   rescaling run less often than they are counted here.
//! - **Share of peak**: a quarter of a multiprocessor issues one instruction a cycle and executes one mma at a time. With
//!   `w` warps, `m` mma of `c` cycles and `i` instructions in the loop, `w` rounds take the longest of `w m c` (tensor
//!   cores), `w i` (issue) and `m c + i - m` (one warp alone, which overlaps nothing with its own mma). The measured loops
//!   of other libraries reach about nine tenths of this bound, so it is multiplied by 0.9, and by the share of the peak
//!   that `mma.sync` has. Memory is not modeled.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::{Context, Result};
use kernels::DType;
use kernels::cuda::device_kind::{AttentionBackward, DeviceKind};
use kernels::cuda::module::Module;
use kernels::cuda::nvrtc::Compiler;
use kernels::cuda::ops::{attention, product};

use crate::compile::{ARCHITECTURES, COUNT, Limits, Table};
use crate::stages::Setting;

/// Shared memory that CUDA reserves in each block, in bytes.
const RESERVED_SHARED_BYTES: u32 = 1024;
/// Registers of a quarter of a multiprocessor, and how many a warp takes at a time.
const QUARTER_REGISTERS: u32 = 16_384;
const REGISTER_UNIT: u32 = 256;
/// Share of the bound that good loops reach.
const REACHED: f64 = 0.9;
/// Opcodes: HMMA, and the two forms of BRA.
const MMA: u64 = 0x23c;
const BRANCHES: [u64; 2] = [0x947, 0x547];

/// Kind of card: limits of a multiprocessor (CUDA C++ Programming Guide, "Technical specifications per compute
/// capability") and the speed of its tensor cores.
#[derive(Clone, Copy, Debug)]
pub struct Card {
    /// Names of cards.
    pub name: &'static str,
    /// Compute capability.
    pub capability: (u32, u32),
    /// Most resident threads.
    pub threads: u32,
    /// Most resident blocks.
    pub blocks: u32,
    /// Cycles of one `mma` m16n8k16 with f32 sums in a quarter of a multiprocessor, at the peak of NVIDIA's data sheet.
    pub mma_cycles: f64,
    /// Share of that peak which `mma.sync` has. Hopper's and Blackwell's data center cards reach the peak with other
    /// instructions only.
    pub mma_share: f64,
}

/// Kinds of cards, one per architecture of [`ARCHITECTURES`].
pub const CARDS: [Card; COUNT] = [
    card("A100", (8, 0), 2048, 32, 8.0, 1.0),
    card("RTX 3090", (8, 6), 1536, 16, 32.0, 1.0),
    card("RTX 4090", (8, 9), 1536, 24, 32.0, 1.0),
    card("H100", (9, 0), 2048, 32, 4.0, 0.63),
    card("B200", (10, 0), 2048, 32, 2.0, 0.32),
    card("RTX 5090", (12, 0), 1536, 24, 32.0, 1.0),
];

const fn card(
    name: &'static str,
    capability: (u32, u32),
    threads: u32,
    blocks: u32,
    mma_cycles: f64,
    mma_share: f64,
) -> Card {
    Card {
        name,
        capability,
        threads,
        blocks,
        mma_cycles,
        mma_share,
    }
}

impl Card {
    /// Shared memory of a multiprocessor in bytes.
    #[must_use]
    pub const fn shared_bytes(&self) -> u32 {
        let kind = DeviceKind {
            multiprocessors: 1,
            compute_capability: Some(self.capability),
            has_library: false,
            attention_backward: AttentionBackward::Split,
        };
        kind.shared_bytes()
    }

    /// Blocks of a kernel that a multiprocessor holds at a time.
    #[must_use]
    pub fn resident_blocks(&self, threads: u32, registers: u32, shared_bytes: u32) -> u32 {
        let warps = threads.div_ceil(32).max(1);
        let of_a_warp = (registers.max(1) * 32).next_multiple_of(REGISTER_UNIT);
        let by_registers = QUARTER_REGISTERS / of_a_warp * 4 / warps;
        let by_shared = self.shared_bytes() / (shared_bytes + RESERVED_SHARED_BYTES);
        let by_threads = self.threads / (32 * warps);
        by_registers.min(by_shared).min(by_threads).min(self.blocks)
    }

    /// Share of the card's peak that a loop can reach with this many resident warps.
    fn share(&self, body: Loop, warps: u32) -> f64 {
        // Cycles at the speed of `mma.sync`.
        let mma = f64::from(body.mma) * self.mma_cycles / self.mma_share;
        let quarter = f64::from(warps) / 4.0;
        let issue = f64::from(body.instructions);
        let others = issue - f64::from(body.mma);
        let time = (quarter * mma).max(quarter * issue).max(mma + others);
        REACHED * self.mma_share * quarter * mma / time
    }
}

/// Instructions of a loop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Loop {
    instructions: u32,
    mma: u32,
}

/// The loop with the most mma of each kernel of a cubin; the shortest of several.
fn loops(cubin: &[u8], capability: (u32, u32)) -> Result<BTreeMap<String, Loop>> {
    let mut found = BTreeMap::new();
    for (name, code) in sections(cubin).context("no ELF file")? {
        let Some(kernel) = name.strip_prefix(".text.") else {
            continue;
        };
        if let Some(body) = longest_loop(code, capability) {
            found.insert(kernel.to_owned(), body);
        }
    }
    Ok(found)
}

/// Names and contents of the sections of an ELF file of 64 bits. `None` for another file.
fn sections(file: &[u8]) -> Option<Vec<(String, &[u8])>> {
    let number = |at: usize, bytes: usize| -> Option<usize> {
        let mut word = [0; 8];
        word[..bytes].copy_from_slice(file.get(at..at + bytes)?);
        usize::try_from(u64::from_le_bytes(word)).ok()
    };
    let (headers, size, count, names) = (
        number(0x28, 8)?,
        number(0x3a, 2)?,
        number(0x3c, 2)?,
        number(0x3e, 2)?,
    );
    let content = |header: usize| -> Option<&[u8]> {
        let at = number(header + 0x18, 8)?;
        file.get(at..at + number(header + 0x20, 8)?)
    };
    let names = content(headers + names * size)?;
    let all = (0..count).map(|i| headers + i * size);
    // Sections without content have a place outside the file.
    let all = all.filter_map(|header| {
        let name = names.get(number(header, 4)?..)?;
        let name = name.split(|byte| *byte == 0).next()?;
        Some((String::from_utf8_lossy(name).into_owned(), content(header)?))
    });
    Some(all.collect())
}

fn longest_loop(code: &[u8], capability: (u32, u32)) -> Option<Loop> {
    let words: Vec<u128> = code
        .chunks_exact(16)
        .map(|word| u128::from_le_bytes(word.try_into().expect("16 bytes")))
        .collect();
    let opcode = |word: u128| (word & 0xfff) as u64;
    let mut best: Option<Loop> = None;
    for (at, word) in words.iter().enumerate() {
        if !BRANCHES.contains(&opcode(*word)) {
            continue;
        }
        // Distance from the next instruction in units of 4 bytes; since 9.0 its low byte has a place of its own.
        let high = ((word >> 34) & 0xffff_ffff_ffff) as u64;
        let high = ((high << 16).cast_signed()) >> 16;
        let distance = match capability.0 {
            8 => high,
            _ => (high << 8) | ((word >> 16) & 0xff) as i64,
        };
        let target = at as i64 + 1 + distance / 4;
        let Ok(target) = usize::try_from(target) else {
            continue;
        };
        if target > at {
            continue;
        }
        let body = &words[target..=at];
        let mma = body.iter().filter(|word| opcode(**word) == MMA).count() as u32;
        let instructions = body.len() as u32;
        let better =
            |best: Loop| mma > best.mma || (mma == best.mma && instructions < best.instructions);
        if mma > 0 && best.is_none_or(better) {
            best = Some(Loop { instructions, mma });
        }
    }
    best
}

/// Modules of the table: attention and the products of a layer, in bf16.
fn modelled() -> Vec<Module> {
    let attention = attention::modules().into_iter();
    let attention = attention.filter(|module| module.name().contains("type1"));
    let tiles = product::choosable().into_iter();
    let products = tiles.filter_map(|(dtype, out, transpose, tile)| {
        let forward = dtype == DType::BF16 && out == dtype && transpose == [false, false];
        let general = tile.warps[2] == 1;
        (forward && general).then(|| product::module(dtype, out, transpose, tile))?
    });
    attention.chain(products).collect()
}

/// The model of the kernels with tensor cores, as a Markdown table.
///
/// # Errors
/// When NVRTC is missing or a module does not compile.
pub fn table(setting: &Setting, resources: &Table) -> Result<String> {
    let compiler = Compiler::find(&setting.search)?;
    let mut text = "| kernel | instructions per mma |".to_owned();
    for card in CARDS {
        // Writing to a string cannot fail.
        let _ok = write!(text, " {} |", card.name);
    }
    let _ok = writeln!(text, "\n|---|---|{}", "---|".repeat(COUNT));
    for module in modelled() {
        let mut bodies = Vec::new();
        for (arch, card) in ARCHITECTURES.iter().zip(CARDS) {
            bodies.push(loops(
                &compiler.compile(&module, arch)?.cubin,
                card.capability,
            )?);
        }
        for (kernel, first) in &bodies[0] {
            let key = (module.name(), kernel.clone());
            let limits = resources.get(&key).context("a kernel outside the table")?;
            let per_mma = f64::from(first.instructions) / f64::from(first.mma);
            let _ok = write!(text, "| {} `{kernel}` | {per_mma:.1} |", short(&module));
            for ((card, body), registers) in CARDS.iter().zip(&bodies).zip(limits.registers) {
                let blocks =
                    card.resident_blocks(limits.threads, registers.count, limits.shared_bytes);
                let warps = blocks * limits.threads / 32;
                let share = body
                    .get(kernel)
                    .map_or(0.0, |body| card.share(*body, warps));
                let _ok = write!(text, " {blocks}, {:.0} % |", 100.0 * share);
            }
            text.push('\n');
        }
    }
    Ok(text)
}

/// The part of a module's name that readers need.
fn short(module: &Module) -> String {
    let name = module.name();
    let number = |key: &str| {
        let rest = name.split('-').find_map(|part| part.strip_prefix(key));
        rest.map(str::to_owned)
    };
    match (number("head_dim"), number("block_m"), number("block_n")) {
        (Some(d), ..) => format!("attention, head dim {d},"),
        (_, Some(m), Some(n)) => format!("product, tile {m}x{n},"),
        _ => name,
    }
}

/// Why fewer than eight warps of a kernel may be resident on a card. `None` if they must be.
#[must_use]
pub fn exemption(module: &str, kernel: &str, limits: &Limits, card: &Card) -> Option<&'static str> {
    let head_dim = module
        .split('-')
        .find_map(|part| part.strip_prefix("head_dim"));
    let head_dim: Option<u32> = head_dim.and_then(|number| number.parse().ok());
    let small = card.shared_bytes() <= 100 << 10;
    match (head_dim, kernel) {
        (Some(80..), "forward_128" | "gradient_q_128") if small => {
            Some("the launch takes tiles of 64 queries")
        }
        (Some(80..), "gradient_kv") if small => {
            Some("keys, values and two stages of queries are more than half of the memory")
        }
        (None, _) if module.starts_with("lora_linear") && limits.shared_bytes >= 64 << 10 => {
            Some("bound by memory: one block has 64 KiB of copies in flight")
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::parse_table;
    use std::collections::BTreeSet;

    /// Fewer than eight warps leave the tensor cores idle during a softmax, and memory idle between loads.
    #[test]
    fn every_kernel_keeps_eight_warps_resident_on_every_card() {
        let table = parse_table(include_str!("../kernel_resources.csv")).unwrap();
        let mut problems = Vec::new();
        let mut used = BTreeSet::new();
        for ((module, kernel), limits) in &table {
            for (card, registers) in CARDS.iter().zip(limits.registers) {
                let blocks =
                    card.resident_blocks(limits.threads, registers.count, limits.shared_bytes);
                let warps = blocks * limits.threads.div_ceil(32);
                let enough = warps >= 8;
                match exemption(module, kernel, limits, card) {
                    Some(reason) if !enough && blocks >= 1 => _ = used.insert(reason),
                    None if !enough => problems.push(format!(
                        "{module} {kernel}: {blocks} blocks on {}",
                        card.name
                    )),
                    _ => {}
                }
                assert!(blocks >= 1, "{module} {kernel} does not fit {}", card.name);
            }
        }
        assert_eq!(problems, Vec::<String>::new());
        assert_eq!(used.len(), 3, "an exemption that no kernel needs: {used:?}");
    }

    /// The figures beside TUNING in attention.cu.
    #[test]
    fn attention_has_the_resident_blocks_that_its_table_states() {
        let table = parse_table(include_str!("../kernel_resources.csv")).unwrap();
        let source = include_str!("../../../kernels/src/cuda/source/attention.cu");
        let rows = source
            .lines()
            .filter_map(|line| line.trim().strip_prefix('{'));
        let rows: Vec<(&str, &str)> = rows.filter_map(|row| row.split_once("},")).collect();
        assert_eq!(rows.len(), 6);
        for (constants, comment) in rows {
            let head_dim = constants.split(',').next().unwrap().trim();
            let stated: Vec<&str> = comment
                .trim()
                .trim_start_matches("//")
                .split_whitespace()
                .collect();
            let kernels = [
                "forward_128",
                "forward_64",
                "gradient_q_128",
                "gradient_q_64",
                "gradient_kv",
            ];
            assert_eq!(stated.len(), kernels.len(), "{comment}");
            for (kernel, stated) in kernels.iter().zip(stated) {
                let module = format!("attention-type1-head_dim{head_dim}");
                let limits = table[&(module.clone(), (*kernel).to_owned())];
                // Cards with 100, 164 and 228 KB.
                let counts = [5, 0, 3].map(|place| {
                    let (card, registers) = (CARDS[place], limits.registers[place]);
                    let blocks =
                        card.resident_blocks(limits.threads, registers.count, limits.shared_bytes);
                    let reason = exemption(&module, kernel, &limits, &card);
                    match reason {
                        Some(reason) if reason.contains("64 queries") => "-".to_owned(),
                        _ => blocks.to_string(),
                    }
                });
                assert_eq!(counts.join("/"), stated, "head dim {head_dim}, {kernel}");
            }
        }
    }

    #[test]
    fn resident_blocks_are_those_of_the_occupancy_calculator() {
        let [a100, ampere, _, h100, ..] = CARDS;
        // Registers: 168 x 128 of 65 536, in units of 256 a warp.
        assert_eq!(a100.resident_blocks(128, 168, 0), 3);
        assert_eq!(a100.resident_blocks(256, 246, 98_304), 1);
        // Shared memory: two blocks of 49 KB, one of 50.
        assert_eq!(ampere.resident_blocks(128, 160, 49_152), 2);
        assert_eq!(ampere.resident_blocks(128, 160, 50_688), 1);
        // Threads and blocks.
        assert_eq!(ampere.resident_blocks(1024, 32, 0), 1);
        assert_eq!(h100.resident_blocks(1024, 32, 0), 2);
        assert_eq!(ampere.resident_blocks(32, 16, 0), 16);
    }

    #[test]
    fn the_longest_loop_is_read_from_machine_code() {
        // Ten instructions: two mma and a branch from the last to the third.
        let mut words = vec![0x1u128; 10];
        (words[4], words[6]) = (MMA.into(), MMA.into());
        let distance = -8i64 * 4;
        let code = |branch: u128| -> Vec<u8> {
            let mut words = words.clone();
            words[9] = branch;
            words.iter().flat_map(|word| word.to_le_bytes()).collect()
        };
        let bits = |value: i64| u128::from(value.cast_unsigned() & 0xffff_ffff_ffff);
        let old = 0x947 | bits(distance) << 34;
        let new =
            0x547 | bits(distance >> 8) << 34 | u128::from(distance.cast_unsigned() & 0xff) << 16;
        let want = Some(Loop {
            instructions: 8,
            mma: 2,
        });
        assert_eq!(longest_loop(&code(old), (8, 6)), want);
        assert_eq!(longest_loop(&code(new), (12, 0)), want);
        assert_eq!(longest_loop(&code(0x94d), (8, 6)), None);
    }

    #[test]
    fn one_warp_overlaps_nothing_and_two_do() {
        let body = Loop {
            instructions: 700,
            mma: 200,
        };
        let a100 = CARDS[0];
        let alone = 0.9 * 1600.0 / (1600.0 + 500.0);
        assert!((a100.share(body, 4) - alone).abs() < 1e-9);
        assert!((a100.share(body, 8) - 0.9).abs() < 1e-9);
        assert!(CARDS[3].share(body, 8) <= 0.9 * 0.63 + 1e-9);
    }
}
