//! Libraries and device of a rank. Ranks compare them after the rendezvous, on every transport.
//!
//! A difference in facts of [`Concern::Results`] ends the run: ranks would compute different bits for the same
//! samples, or could not communicate. Other differences are reported once in a warning.

use crate::lang::{Both, Text, both, text};
use std::collections::BTreeMap;
use std::hint::black_box;

use engine::comm::{CommError, Communicator, Tag};
use serde::{Deserialize, Serialize};

use crate::config::{Device, Products, RunConfig};
use crate::device::survey::facts::{Cuda, Gpu, LibraryKind};
use crate::device::survey::{instruction_sets, libc};
use crate::device::{Devices, gpu_of};
use crate::error::failures::comm as comm_failure;
use crate::error::{ErrorCode, Failure};
use crate::launch::hostfile::host_name;
use crate::rank_env::{RankEnv, Variables};

const MATHEMATICS: &str = "math functions of the C library";
const C_LIBRARY: &str = "C library";
const INSTRUCTIONS: &str = "instruction sets";
const NVRTC: &str = "NVRTC";
const PRODUCTS: &str = "matrix products";
const ATTENTION_BACKWARD: &str = "attention backward";
const DRIVER: &str = "GPU driver";
const GPU: &str = "GPU";
const COMPUTE_CAPABILITY: &str = "compute capability";
#[cfg(feature = "mpi")]
const MPI: &str = "MPI library";

/// Consequence that a difference between ranks in one property has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Concern {
    /// The results have different bits, or ranks cannot communicate.
    Results,
    /// At most, ranks have different speeds.
    Speed,
}

/// One property of a rank's libraries or device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Fact {
    name: String,
    value: String,
    concern: Concern,
}

/// Properties of one rank's libraries and device, and the name of its host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Machine {
    host: String,
    facts: Vec<Fact>,
}

impl Machine {
    /// Properties of this rank. CUDA's libraries count if the run uses a GPU, and cuBLASLt if it multiplies matrices
    /// on it. NCCL does not count, since its process group compares the version itself.
    pub(super) fn of(config: &RunConfig, env: &RankEnv, devices: &dyn Devices) -> Self {
        let mut machine = Self {
            host: host_name(),
            facts: Vec::new(),
        };
        machine.add(MATHEMATICS, mathematics(), Concern::Results);
        machine.add(C_LIBRARY, or_unknown(libc()), Concern::Speed);
        machine.add(INSTRUCTIONS, instruction_sets().join(" "), Concern::Speed);
        #[cfg(feature = "mpi")]
        if env.is_under_mpi() {
            let version = engine::comm::mpi::library_version();
            machine.add(MPI, version, Concern::Results);
        }
        if config.device == Device::Cuda {
            let (cuda, gpus) = devices.survey(&Variables::read());
            let own = gpu_of(config, env.local_rank);
            let products = own.map_or(Products::Own, |gpu| gpu.products);
            let ordinal = own.map(|gpu| gpu.ordinal);
            let gpu = gpus.iter().find(|gpu| gpu.ordinal == ordinal);
            machine.add_gpu(&cuda, gpu, env.has_peers_elsewhere());
            machine.add_products(&cuda, products);
            let backward = match own.is_some_and(|gpu| gpu.fused_attention_backward) {
                true => "fused",
                false => "split",
            };
            machine.add(ATTENTION_BACKWARD, backward, Concern::Results);
        }
        machine
    }

    fn add(&mut self, name: &str, value: impl Into<String>, concern: Concern) {
        self.facts.push(Fact {
            name: name.to_owned(),
            value: value.into(),
            concern,
        });
    }

    fn add_gpu(&mut self, cuda: &Cuda, gpu: Option<&Gpu>, is_among_machines: bool) {
        let library = |kind| cuda.libraries.iter().find(|library| library.kind == kind);
        let nvrtc = library(LibraryKind::Nvrtc).filter(|library| library.path.is_some());
        let nvrtc = nvrtc.map(|library| or_unknown(library.version.clone()));
        let nvrtc = nvrtc.unwrap_or_else(|| "none: built-in PTX".to_owned());
        // The compiler decides which products and sums are fused into one operation.
        self.add(NVRTC, nvrtc, Concern::Results);
        let driver = cuda.driver.clone().or_else(|| {
            let (major, minor) = cuda.cuda_version?;
            Some(format!("for CUDA {major}.{minor}"))
        });
        self.add(DRIVER, or_unknown(driver), Concern::Speed);
        let name = gpu.and_then(|gpu| gpu.name.clone());
        self.add(GPU, or_unknown(name), Concern::Speed);
        let capability = gpu.and_then(|gpu| gpu.compute_capability);
        let capability = capability.map(|(major, minor)| format!("{major}.{minor}"));
        // The order of sums in tensor cores depends on their generation. GPUs of one machine may differ: the run
        // reports it at the start, and repeating it on that machine gives the same bits.
        let concern = match is_among_machines {
            true => Concern::Results,
            false => Concern::Speed,
        };
        self.add(COMPUTE_CAPABILITY, or_unknown(capability), concern);
    }

    /// Adds cuBLASLt's version, since versions may sum in different orders.
    fn add_products(&mut self, cuda: &Cuda, products: Products) {
        let mut by = products.to_string();
        if products == Products::CublasLt {
            let mut libraries = cuda.libraries.iter();
            let library = libraries.find(|library| library.kind == LibraryKind::CublasLt);
            let version = library.and_then(|library| library.version.clone());
            by += &format!(" {}", or_unknown(version));
        }
        self.add(PRODUCTS, by, Concern::Results);
    }

    fn value(&self, name: &str) -> &str {
        let fact = self.facts.iter().find(|fact| fact.name == name);
        fact.map_or("nothing", |fact| &fact.value)
    }
}

fn or_unknown(text: Option<String>) -> String {
    text.unwrap_or_else(|| "unknown".to_owned())
}

/// Hash of some logarithms, powers and cosines on this machine. Losses, schedules and positions use these functions.
/// Their last bits depend on the C library's version and, inside it, on the CPU.
fn mathematics() -> String {
    let mut hash = blake3::Hasher::new();
    for i in 1..=4096_u32 {
        let x = black_box(f64::from(i) * 0.003_173);
        let y = black_box(x as f32);
        for value in [x.ln(), x.cos(), x.exp(), (1.0 / (1.0 + x)).powf(x)] {
            hash.update(&value.to_bits().to_le_bytes());
        }
        for value in [y.ln(), 10_000_f32.powf(y / 13.0)] {
            hash.update(&value.to_bits().to_le_bytes());
        }
    }
    hash.finalize().to_hex()[..16].to_owned()
}

/// Compares the properties of all ranks. If all agree, only a hash is exchanged. Returns warnings.
///
/// # Errors
/// Results would differ (exit 13). Every rank names the same ranks.
pub(super) fn compare(own: &Machine, comm: &dyn Communicator) -> Result<Vec<Text>, Failure> {
    let failed = |error: CommError| comm_failure(&error);
    let facts = serde_json::to_vec(&own.facts).unwrap_or_default();
    let hashes = comm
        .all_gather_bytes(blake3::hash(&facts).as_bytes(), Tag::new("machine", 0))
        .map_err(failed)?;
    if hashes.windows(2).all(|pair| pair[0] == pair[1]) {
        return Ok(Vec::new());
    }
    let own = serde_json::to_vec(own).unwrap_or_default();
    let all = comm
        .all_gather_bytes(&own, Tag::new("machine", 1))
        .map_err(failed)?;
    let all: Result<Vec<Machine>, _> = all.iter().map(|m| serde_json::from_slice(m)).collect();
    let all = all.map_err(|error| {
        Failure::new(
            ErrorCode::Rendezvous,
            both(
                "the library description of a rank cannot be parsed",
                "无法解析某个 rank 的库描述",
            ),
            Text::literal(&error),
        )
        .next(both(
            "start all ranks from the same build",
            "请用同一个构建启动所有 rank",
        ))
    })?;
    judge(&all)
}

/// A property in which ranks differ.
struct Difference<'a> {
    name: &'a str,
    concern: Concern,
    /// Values with their ranks, the most common value first.
    values: Vec<(&'a str, Vec<usize>)>,
}

fn differences(all: &[Machine]) -> Vec<Difference<'_>> {
    let mut found: Vec<Difference<'_>> = Vec::new();
    for fact in all.iter().flat_map(|machine| &machine.facts) {
        if let Some(known) = found.iter_mut().find(|known| known.name == fact.name) {
            if fact.concern == Concern::Results {
                known.concern = Concern::Results;
            }
            continue;
        }
        let mut ranks: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (rank, machine) in all.iter().enumerate() {
            ranks
                .entry(machine.value(&fact.name))
                .or_default()
                .push(rank);
        }
        let mut values: Vec<_> = ranks.into_iter().collect();
        // Between equally common values, that of rank 0 counts as the most common.
        values.sort_by_key(|(_, ranks)| (std::cmp::Reverse(ranks.len()), ranks[0]));
        found.push(Difference {
            name: &fact.name,
            concern: fact.concern,
            values,
        });
    }
    found.retain(|difference| difference.values.len() > 1);
    found
}

fn judge(all: &[Machine]) -> Result<Vec<Text>, Failure> {
    let differences = differences(all);
    let (serious, harmless): (Vec<_>, Vec<_>) = differences
        .iter()
        .partition(|difference| difference.concern == Concern::Results);
    let Some(first) = serious.first() else {
        return Ok(harmless.iter().map(|other| other.warning(all)).collect());
    };
    let odd = first.odd();
    let compute = match odd.len() {
        1 => "computes",
        _ => "compute",
    };
    let mut failure = Failure::new(
        ErrorCode::Rendezvous,
        text!(
            "{} {compute} with another {} than the other ranks",
            "{} 计算时使用的 {1} 与其他 rank 不同",
            of_ranks(&odd),
            property(first.name)
        ),
        match is_protocol(first.name) {
            true => both(
                "the ranks may not understand each other's messages",
                "各 rank 可能无法理解彼此的消息",
            ),
            false => both(
                "results would depend on which rank computes them",
                "结果会取决于由哪个 rank 计算",
            ),
        },
    );
    for difference in &serious {
        failure = failure.evidence_lines(difference.lines(all));
    }
    for difference in &harmless {
        failure = failure.evidence_lines(difference.lines(all));
    }
    Err(failure.next(remedy(first.name)))
}

/// A property as messages name it.
fn property(name: &str) -> Text {
    let zh = match name {
        MATHEMATICS => "C 库数学函数",
        C_LIBRARY => "C 库",
        INSTRUCTIONS => "指令集",
        PRODUCTS => "矩阵乘法",
        ATTENTION_BACKWARD => "注意力的反向传播",
        DRIVER => "GPU 驱动",
        COMPUTE_CAPABILITY => "计算能力",
        #[cfg(feature = "mpi")]
        MPI => "MPI 库",
        other => other,
    };
    Text::new(name, zh)
}

fn is_protocol(name: &str) -> bool {
    name.starts_with("MPI")
}

fn remedy(name: &str) -> Both {
    match name {
        NVRTC => both(
            "use the same NVRTC on every machine; TESSERA_CUDA_LIBS gives the directory to search first, `launcher doctor` shows which NVRTC is found",
            "请在每台机器上使用相同的 NVRTC；TESSERA_CUDA_LIBS 指定最先搜索的目录，`launcher doctor` 会显示找到的 NVRTC",
        ),
        PRODUCTS => both(
            "use the same cuBLASLt on every machine, or TESSERA_MATMUL=own on all: the kernels of this program then compute matrix products",
            "请在每台机器上使用相同的 cuBLASLt，或在所有机器上设置 TESSERA_MATMUL=own：矩阵乘法改由本程序的内核计算",
        ),
        ATTENTION_BACKWARD => both(
            "set TESSERA_ATTENTION_BACKWARD on every machine, or on none",
            "请在每台机器上都设置 TESSERA_ATTENTION_BACKWARD，或都不设置",
        ),
        COMPUTE_CAPABILITY => both(
            "use machines with GPUs of one generation, or --device cpu on all",
            "请使用同一代 GPU 的机器，或在所有机器上使用 --device cpu",
        ),
        MATHEMATICS => both(
            "use the same operating system or container image on every machine, and processors of one kind",
            "请在每台机器上使用相同的操作系统或容器镜像，以及同一种处理器",
        ),
        _ => both(
            "use the same version on every machine",
            "请在每台机器上使用相同的版本",
        ),
    }
}

impl Difference<'_> {
    /// Ranks that do not have the most common value.
    fn odd(&self) -> Vec<usize> {
        let others = self.values.iter().skip(1);
        let mut odd: Vec<usize> = others.flat_map(|(_, ranks)| ranks).copied().collect();
        odd.sort_unstable();
        odd
    }

    /// One line for each value of the property: the ranks that have it, and their hosts.
    fn lines<'a>(&'a self, all: &'a [Machine]) -> impl Iterator<Item = Text> + 'a {
        self.values.iter().map(move |(value, ranks)| {
            let mut hosts: Vec<&str> = ranks.iter().map(|rank| &*all[*rank].host).collect();
            hosts.dedup();
            let hosts = shortened(&hosts, ", ");
            let ranks = of_ranks(ranks);
            text!(
                "{} of {ranks} ({hosts}): {value:?}",
                "{ranks} 的 {}（{hosts}）：{value:?}",
                property(self.name)
            )
        })
    }

    fn warning(&self, all: &[Machine]) -> Text {
        let lines: Vec<Text> = self.lines(all).collect();
        text!(
            "ranks differ, without an effect on results: {}",
            "各 rank 有以下不影响结果的差异：{}",
            Text::join(&lines, "; ")
        )
    }
}

fn of_ranks(ranks: &[usize]) -> Text {
    match ranks {
        [one] => text!("rank {one}", "rank {one}"),
        _ => text!("ranks {}", "rank {}", numbers(ranks)),
    }
}

fn numbers(ranks: &[usize]) -> Text {
    let ranks: Vec<String> = ranks.iter().map(ToString::to_string).collect();
    let ranks: Vec<&str> = ranks.iter().map(String::as_str).collect();
    shortened(&ranks, ", ")
}

/// The first eight words, and how many more there are.
fn shortened(words: &[&str], separator: &str) -> Text {
    const SHOWN: usize = 8;
    let shown = words[..words.len().min(SHOWN)].join(separator);
    match words.len().saturating_sub(SHOWN) {
        0 => Text::literal(shown),
        more => text!("{shown} and {more} more", "{shown} 等另外 {more} 个"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::survey::facts::LibraryFacts;
    use std::path::PathBuf;

    /// A machine with a GPU, where `change` may make it another.
    fn machine(host: &str, change: impl FnOnce(&mut Cuda, &mut Gpu)) -> Machine {
        let library = |kind, version: &str| LibraryFacts {
            kind,
            name: "a library".into(),
            path: Some(PathBuf::from("/lib")),
            version: Some(version.into()),
            attempts: Vec::new(),
        };
        let mut cuda = Cuda {
            driver: Some("580.65.06".into()),
            libraries: vec![
                library(LibraryKind::Nvrtc, "13.0"),
                library(LibraryKind::CublasLt, "13.1.0"),
                library(LibraryKind::Nccl, "2.28"),
            ],
            ..Cuda::default()
        };
        let mut gpu = Gpu {
            name: Some("NVIDIA H200".into()),
            compute_capability: Some((9, 0)),
            ..Gpu::default()
        };
        change(&mut cuda, &mut gpu);
        let mut machine = Machine {
            host: host.into(),
            facts: Vec::new(),
        };
        machine.add(MATHEMATICS, "00ff", Concern::Results);
        machine.add(C_LIBRARY, "glibc 2.36", Concern::Speed);
        machine.add(INSTRUCTIONS, "avx2 fma", Concern::Speed);
        machine.add("MPI library", "Open MPI v4.1.4", Concern::Results);
        machine.add_gpu(&cuda, Some(&gpu), true);
        machine.add_products(&cuda, Products::Own);
        machine
    }

    #[test]
    fn the_version_of_a_library_counts_where_it_computes_products() {
        let multiplies = |version: &str| {
            let mut machine = plain("gpu02");
            machine.facts.retain(|fact| fact.name != PRODUCTS);
            let library = LibraryFacts {
                kind: LibraryKind::CublasLt,
                name: "a library".into(),
                path: Some(PathBuf::from("/lib")),
                version: Some(version.into()),
                attempts: Vec::new(),
            };
            let cuda = Cuda {
                libraries: vec![library],
                ..Cuda::default()
            };
            machine.add_products(&cuda, Products::CublasLt);
            machine
        };
        let one = || multiplies("13.1.0");
        assert_eq!(judge(&[one(), one()]).expect("equal").len(), 0);
        for other in [multiplies("12.9.0"), plain("gpu01")] {
            let failure = judge(&[one(), other]).expect_err("differs");
            assert!(failure.title.contains(PRODUCTS), "{failure}");
            assert!(failure.next[0].contains("TESSERA_MATMUL"), "{failure}");
        }
    }

    #[test]
    fn other_kernels_of_the_attention_backward_are_refused() {
        let with = |kernels: &str| {
            let mut machine = plain("gpu02");
            machine.add(ATTENTION_BACKWARD, kernels, Concern::Results);
            machine
        };
        let equal = judge(&[with("fused"), with("fused")]).expect("equal");
        assert_eq!(equal.len(), 0);
        let failure = judge(&[with("fused"), with("split")]).expect_err("differs");
        let next = &failure.next[0];
        assert!(next.contains("TESSERA_ATTENTION_BACKWARD"), "{failure}");
    }

    fn plain(host: &str) -> Machine {
        machine(host, |_, _| ())
    }

    fn with(name: &str, value: &str) -> Machine {
        let mut machine = plain("gpu02");
        let fact = machine.facts.iter_mut().find(|fact| fact.name == name);
        fact.expect("a fact").value = value.into();
        machine
    }

    #[test]
    fn differences_that_change_results_are_refused_with_their_rank() {
        for (name, value, words) in [
            (MATHEMATICS, "00fe", "container image"),
            (NVRTC, "12.8", "TESSERA_CUDA_LIBS"),
            (COMPUTE_CAPABILITY, "8.0", "one generation"),
            ("MPI library", "Open MPI v5.0.0", "the same version"),
        ] {
            let all = [plain("gpu01"), with(name, value), plain("gpu01")];
            let failure = judge(&all).expect_err(name);
            assert_eq!((failure.code.as_str(), failure.code.status()), ("E03", 13));
            assert_eq!(
                failure.title,
                format!("rank 1 computes with another {name} than the other ranks")
            );
            let own = all[0].value(name);
            assert_eq!(
                failure.evidence,
                [
                    format!("{name} of ranks 0, 2 (gpu01): {own:?}"),
                    format!("{name} of rank 1 (gpu02): {value:?}"),
                ]
            );
            assert!(failure.next[0].contains(words), "{failure}");
        }
    }

    #[test]
    fn differences_that_change_only_speed_are_warnings() {
        for (name, value) in [
            (C_LIBRARY, "glibc 2.31"),
            (INSTRUCTIONS, "avx2 fma avx512f"),
            (DRIVER, "575.1"),
            (GPU, "NVIDIA H100"),
        ] {
            let all = [plain("gpu01"), with(name, value)];
            let warnings = judge(&all).expect(name);
            let own = all[0].value(name);
            assert_eq!(
                warnings,
                [format!(
                    "ranks differ, without an effect on results: {name} of rank 0 (gpu01): {own:?}; {name} of rank 1 (gpu02): {value:?}"
                )]
            );
        }
        let quiet = judge(&[plain("gpu01"), plain("gpu02")]).expect("equal");
        assert!(quiet.is_empty(), "{quiet:?}");
    }

    #[test]
    fn libraries_that_no_run_calls_may_differ() {
        let bare = machine("gpu02", |cuda, _| cuda.libraries.truncate(1));
        assert_eq!(judge(&[plain("gpu01"), bare]).expect("equal").len(), 0);
    }

    #[test]
    fn a_missing_compiler_counts_as_a_difference() {
        let bare = machine("gpu02", |cuda, _| cuda.libraries.clear());
        let failure = judge(&[plain("gpu01"), bare]).expect_err("differs");
        assert!(failure.evidence[1].contains("built-in PTX"), "{failure}");
    }

    #[test]
    fn the_minority_is_named_even_if_rank_0_belongs_to_it() {
        let odd = || with(NVRTC, "12.8");
        let all = [odd(), plain("gpu01"), plain("gpu01"), odd(), plain("gpu01")];
        let failure = judge(&all).expect_err("differs");
        assert!(
            failure.title.starts_with("ranks 0, 3 compute with another"),
            "{failure}"
        );
        let names: Vec<String> = (0..11).map(|i| i.to_string()).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        assert_eq!(shortened(&names, ", "), "0, 1, 2, 3, 4, 5, 6, 7 and 3 more");
    }

    #[test]
    fn gpus_of_one_machine_may_differ() {
        let on_one = |capability| {
            let mut machine = Machine {
                host: "gpu01".into(),
                facts: Vec::new(),
            };
            let gpu = Gpu {
                compute_capability: Some(capability),
                ..Gpu::default()
            };
            machine.add_gpu(&Cuda::default(), Some(&gpu), false);
            machine
        };
        let warnings = judge(&[on_one((8, 6)), on_one((8, 9))]).expect("only slower");
        assert_eq!(warnings.len(), 1);
    }

    #[test]
    fn all_ranks_get_the_same_verdict() {
        let results = crate::launch::rendezvous::tests::on_ranks(3, |comm| {
            let own = match comm.world().rank {
                2 => with(NVRTC, "12.8"),
                _ => plain("gpu01"),
            };
            compare(&own, comm)
        });
        for result in results {
            let failure = result.expect_err("differs");
            assert!(failure.title.starts_with("rank 2 "), "{failure}");
        }
        let results = crate::launch::rendezvous::tests::on_ranks(2, |comm| {
            let hosts = ["gpu01", "gpu02"];
            compare(&plain(hosts[comm.world().rank]), comm)
        });
        assert!(results.iter().all(|found| found == &Ok(Vec::new())));
    }

    #[test]
    fn the_digest_of_cpu_math_is_reproducible() {
        assert_eq!(mathematics(), mathematics());
    }
}
