//! The only reader of environment variables. All other code receives values.
//!
//! The program that started this process may have numbered it ([`crate::rank_env::identity`]). Then this process is a
//! rank and starts none, or it starts the ranks of its machine. Otherwise it starts all ranks.

pub mod identity;

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::time::SystemTime;

use crate::error::Failure;
use crate::lang::{Both, Lang, both, text};
use identity::{Identity, Master, NodeAssignment, RankIs, Source};

/// Environment variable with the rank of a process, counted over all machines from 0.
pub const RANK: &str = "RANK";
/// Environment variable with the rank of a process on its machine, from 0.
pub const LOCAL_RANK: &str = "LOCAL_RANK";
/// Environment variable of NCCL with the name of the host that a rank claims to run on. NCCL accepts several
/// ranks on one GPU only if their names differ.
pub const NCCL_HOSTID: &str = "NCCL_HOSTID";
/// Environment variable with the number of ranks on all machines.
pub const WORLD_SIZE: &str = "WORLD_SIZE";
/// Environment variable with the number of ranks on this machine.
pub const LOCAL_WORLD_SIZE: &str = "LOCAL_WORLD_SIZE";
/// Environment variable with the host name or address of rank 0's machine.
pub const MASTER_ADDR: &str = "MASTER_ADDR";
/// Environment variable with the TCP port on which rank 0 listens.
pub const MASTER_PORT: &str = "MASTER_PORT";
/// Port on which rank 0 listens if MASTER_PORT is not set; torchrun's default.
pub(crate) const DEFAULT_PORT: u16 = 29_500;
/// Environment variable with the job's token, a unique text in the names of all its shared-memory and
/// temporary files. Only this program's supervisor sets it.
pub const RUN_TOKEN: &str = "TESSERA_RUN_TOKEN";
/// Environment variable with the path of the job's private directory. Only this program's supervisor sets it.
pub const JOB_DIR: &str = "TESSERA_JOB_DIR";
/// Environment variable with the secret that the ranks of a job on several machines share. Only processes
/// that know it can join the job.
pub const TOKEN: &str = "TESSERA_JOB_TOKEN";
/// Environment variable with the path of a file that has the secret of [`TOKEN`].
pub const TOKEN_FILE: &str = "TESSERA_JOB_TOKEN_FILE";
/// Environment variable with directories that are searched first for CUDA's libraries, separated by colons.
pub const CUDA_LIBS: &str = "TESSERA_CUDA_LIBS";
/// Environment variable that chooses the implementation of matrix products on GPUs; see [`Matmul`].
pub const MATMUL: &str = "TESSERA_MATMUL";

/// Environment variable that chooses the kernels of attention's backward on GPUs; see
/// [`Variables::fused_attention_backward`].
pub const ATTENTION_BACKWARD: &str = "TESSERA_ATTENTION_BACKWARD";

/// Environment variable that chooses the machine code of the GPU kernels; see [`GpuCode`].
pub const GPU_CODE: &str = "TESSERA_CUDA_ARCH";

/// Environment variable that forbids registering frozen host weights with the GPU's driver; see [`HostRegister`].
pub const HOST_REGISTER: &str = "TESSERA_HOST_REGISTER";

/// How frozen weights in host memory are copied to GPUs, from the environment variable [`HOST_REGISTER`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum HostRegister {
    /// `auto`: from where they are, if the driver registers that memory, otherwise through pinned memory.
    #[default]
    Auto,
    /// `off`: through pinned memory.
    Off,
}

impl HostRegister {
    /// Value of the environment variable [`HOST_REGISTER`]; [`HostRegister::Auto`] if it is not set. `lookup` returns
    /// the value of a variable by name.
    ///
    /// # Errors
    /// The variable has an invalid value (exit 2).
    pub fn from_lookup(lookup: &dyn Fn(&str) -> Option<OsString>) -> Result<Self, Failure> {
        let values = [("auto", Self::Auto), ("off", Self::Off)];
        let unset = both(
            "memory that the driver registers is copied from where it is",
            "驱动能注册的内存从原处复制",
        );
        Ok(choice(lookup, HOST_REGISTER, &values, unset)?.unwrap_or_default())
    }
}

/// Architecture for which the GPU kernels are compiled, from the environment variable [`GPU_CODE`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum GpuCode {
    /// `native`: code for the GPU's own architecture.
    #[default]
    Native,
    /// `sm_80`: code for sm_80 on every GPU, to reproduce on a newer GPU what an A100 or RTX 3090 runs.
    Sm80,
}

impl GpuCode {
    /// Value of the environment variable [`GPU_CODE`]; [`GpuCode::Native`] if it is not set. `lookup` returns
    /// the value of a variable by name.
    ///
    /// # Errors
    /// The variable has an invalid value (exit 2).
    pub fn from_lookup(lookup: &dyn Fn(&str) -> Option<OsString>) -> Result<Self, Failure> {
        let values = [("native", Self::Native), ("sm_80", Self::Sm80)];
        let unset = both("kernels are compiled for the GPU", "内核按该 GPU 编译");
        Ok(choice(lookup, GPU_CODE, &values, unset)?.unwrap_or(Self::Native))
    }
}

/// Implementation of matrix products on GPUs, from the environment variable [`MATMUL`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Matmul {
    /// `auto`: cuBLASLt if it is found, otherwise this program's kernels.
    #[default]
    Auto,
    /// `cublaslt`: cuBLASLt, or an error.
    CublasLt,
    /// `own`: this program's kernels.
    Own,
}

impl Matmul {
    /// Value of the environment variable [`MATMUL`]; [`Matmul::Auto`] if it is not set. `lookup` returns the
    /// value of a variable by name.
    ///
    /// # Errors
    /// The variable has an invalid value (exit 2).
    pub fn from_lookup(lookup: &dyn Fn(&str) -> Option<OsString>) -> Result<Self, Failure> {
        let values = [
            ("auto", Self::Auto),
            ("cublaslt", Self::CublasLt),
            ("own", Self::Own),
        ];
        let unset = both("cuBLASLt is used if it is found", "找到 cuBLASLt 时使用它");
        Ok(choice(lookup, MATMUL, &values, unset)?.unwrap_or_default())
    }
}

/// Value of the environment variable [`ATTENTION_BACKWARD`]; see [`Variables::fused_attention_backward`].
pub(crate) fn fused_attention_backward(
    lookup: &dyn Fn(&str) -> Option<OsString>,
) -> Result<bool, Failure> {
    let values = [("split", false), ("fused", true)];
    let unset = both(
        "attention's backward has a kernel for queries and one for keys and values",
        "注意力的反向传播中，查询用一个内核，键和值用另一个内核",
    );
    Ok(choice(lookup, ATTENTION_BACKWARD, &values, unset)?.unwrap_or(false))
}

/// Value of the variable `name` among `values`; `None` if it is not set. `unset` is the meaning of that, for
/// messages.
fn choice<T: Copy>(
    lookup: &dyn Fn(&str) -> Option<OsString>,
    name: &str,
    values: &[(&str, T)],
    unset: Both,
) -> Result<Option<T>, Failure> {
    let Some(value) = lookup(name).filter(|value| !value.is_empty()) else {
        return Ok(None);
    };
    let found = values.iter().find(|(spelt, _)| value == *spelt);
    if let Some((_, chosen)) = found {
        return Ok(Some(*chosen));
    }
    let spelt: Vec<&str> = values.iter().map(|(spelt, _)| *spelt).collect();
    let failure = Failure::usage(
        text!(
            "{name}={} is not a known value",
            "{name}={} 不是已知的值",
            value.display()
        ),
        text!("the values are {}", "可取的值为 {}", spelt.join(", ")),
    );
    Err(failure.next(text!("unset {name}: {unset}", "请取消设置 {name}：{unset}")))
}

/// Secret that the ranks of a job on several machines share, or the path of a file that has it. Only
/// processes that know it can join the job. It is never printed.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Token {
    /// The secret itself, from the variable [`TOKEN`]; `None` if that is not set.
    pub text: Option<String>,
    /// Path of a file that has the secret, from the variable [`TOKEN_FILE`]; `None` if that is not set.
    pub file: Option<PathBuf>,
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Token")
            .field("text", &self.text.as_ref().map(|_| "…"))
            .field("file", &self.file)
            .finish()
    }
}

/// What environment variables tell a rank process: its rank, the address of the rendezvous, and the files of
/// its job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankEnv {
    /// Rank of this process, counted over all machines from 0.
    pub rank: usize,
    /// Rank of this process on its machine, from 0.
    pub local_rank: usize,
    /// Number of ranks on all machines.
    pub world_size: usize,
    /// Number of ranks on this machine.
    pub local_world_size: usize,
    /// Address of the rendezvous over several machines, as far as variables give it.
    pub master: Master,
    /// Program that set the variables with this rank's number.
    pub source: Source,
    /// Secret that the ranks of a job on several machines share; empty if no variable gives it.
    pub token: Token,
    /// Token of the job: a text in the names of all its shared-memory and temporary files, by which they are
    /// found and removed.
    pub run_token: String,
    /// Private directory of the job, if this program's supervisor started this rank.
    pub job_dir: Option<PathBuf>,
    /// Whether the environment variable `NO_COLOR` is set: no colors on the terminal.
    pub no_color: bool,
}

impl RankEnv {
    /// The only rank of a job, in the process that owns the job. `run_token` is the job's token.
    pub(crate) fn lone(run_token: String, no_color: bool) -> Self {
        Self {
            rank: 0,
            local_rank: 0,
            world_size: 1,
            local_world_size: 1,
            master: Master::default(),
            source: Source::Torch,
            token: Token::default(),
            run_token,
            job_dir: None,
            no_color,
        }
    }

    /// Whether this program's supervisor started this rank, watches it and draws its screen.
    pub fn is_supervised(&self) -> bool {
        self.job_dir.is_some()
    }

    /// Whether an MPI launcher (`mpirun`) set this rank's number.
    pub fn is_under_mpi(&self) -> bool {
        matches!(self.source, Source::OpenMpi | Source::Pmi | Source::Mvapich)
    }

    /// Whether this rank planned the run itself, and can join the others a second time. Processes of MPI join once.
    pub fn can_plan_again(&self) -> bool {
        #[cfg(feature = "mpi")]
        if self.is_under_mpi() {
            return false;
        }
        !self.is_supervised()
    }

    /// Whether the job also has ranks on other machines.
    pub fn has_peers_elsewhere(&self) -> bool {
        self.local_world_size < self.world_size
    }
}

/// Settings that this program takes from environment variables, read once when it starts.
#[derive(Debug, Clone)]
pub struct Env {
    /// Rank of this process and related settings. `None` in the supervisor, the process that starts the
    /// ranks.
    pub rank: Option<RankEnv>,
    /// Number of this machine among those of the job, and the ranks on each, for a supervisor. `None` in a
    /// rank, and if no variable numbers the machines.
    pub node: Option<NodeAssignment>,
    /// Directory for temporary files: `TMPDIR`, or `/tmp`.
    pub temp_dir: PathBuf,
    /// Directory for files that can be generated again: `tessera` in `XDG_CACHE_HOME`, else in `~/.cache`,
    /// else in the directory for temporary files.
    pub cache_dir: PathBuf,
    /// Whether the environment variable `NO_COLOR` is set: no colors on the terminal.
    pub no_color: bool,
    /// Filter for log messages, such as `debug` or `engine=trace`, from the variable `RUST_LOG`.
    pub rust_log: Option<String>,
    /// Largest area of an image in pixels, from `MAX_PIXELS`.
    pub max_pixels: Option<usize>,
    /// Smallest area of an image in pixels, from `MIN_PIXELS`.
    pub min_pixels: Option<usize>,
    /// Most slices of an image, from `MAX_SLICE_NUMS`.
    pub max_slice_nums: Option<usize>,
    /// Number of pipeline stages, from SAT's variable `MP_SIZE`.
    pub mp_size: Option<usize>,
    /// Number of ranks on each machine, from SAT's variable `NUM_GPUS_PER_WORKER`.
    pub gpus_per_worker: Option<usize>,
    /// Those of these variables of other trainers that are set, but not to a whole number above 0, with their values.
    pub unusable: Vec<(&'static str, String)>,
    /// Time when the variables were read, for names of run directories.
    pub now: SystemTime,
}

/// Language that the locale of this process asks for. English in a rank of this program's supervisor: its output is a
/// log, and the supervisor shows its events and failures.
pub(crate) fn language() -> Lang {
    match std::env::var_os(JOB_DIR) {
        Some(_) => Lang::En,
        None => Lang::of_environment(&|name| std::env::var_os(name)),
    }
}

impl Env {
    /// Variables of other trainers that stand for a flag, with the flag.
    pub(crate) const STAND_INS: [(&str, &str); 5] = [
        ("MAX_PIXELS", "--image-max-pixels"),
        ("MIN_PIXELS", "--image-min-pixels"),
        ("MAX_SLICE_NUMS", "--max-slice-nums"),
        ("MP_SIZE", "--mp-size"),
        ("NUM_GPUS_PER_WORKER", "--nproc"),
    ];

    /// Reads the environment variables of this process. `rank_is` says whether `RANK` counts machines or
    /// processes, if the variables do not tell.
    ///
    /// # Errors
    /// Rank variables are incomplete or contradict each other (exit 13).
    pub fn read(rank_is: Option<RankIs>) -> Result<Self, Failure> {
        Self::from_lookup_as(&|name| std::env::var_os(name), rank_is)
    }

    /// Reads the environment variables for a program that starts no ranks. Variables that number ranks or
    /// machines are ignored.
    pub fn read_alone() -> Self {
        Self::of(&|name| std::env::var_os(name), Identity::Alone)
    }

    /// Settings as from [`Env::read`] with `None` for `rank_is`, but from variables whose values `lookup`
    /// returns by name.
    ///
    /// # Errors
    /// As [`Env::read`].
    pub fn from_lookup(lookup: &dyn Fn(&str) -> Option<OsString>) -> Result<Self, Failure> {
        Self::from_lookup_as(lookup, None)
    }

    /// As [`Env::from_lookup`]. `rank_is` says whether `RANK` counts machines or processes, if the variables
    /// do not tell.
    ///
    /// # Errors
    /// As [`Env::read`].
    pub fn from_lookup_as(
        lookup: &dyn Fn(&str) -> Option<OsString>,
        rank_is: Option<RankIs>,
    ) -> Result<Self, Failure> {
        Ok(Self::of(lookup, identity::find(lookup, rank_is)?))
    }

    fn of(lookup: &dyn Fn(&str) -> Option<OsString>, identity: Identity) -> Self {
        let path = |name: &str| {
            lookup(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        let temp_dir = temp_dir(&path);
        let cache_dir = cache_dir(&path);
        let (rank, node) = match identity {
            Identity::Alone => (None, None),
            Identity::Rank(place) => (Some(place), None),
            Identity::Node(place) => (None, Some(place)),
        };
        let text = |name: &str| lookup(name).and_then(|value| value.into_string().ok());
        let count = |name: &str| text(name)?.trim().parse().ok().filter(|count| *count > 0);
        let unusable = |name: &'static str| {
            let value = lookup(name)?.to_string_lossy().trim().to_owned();
            (count(name).is_none() && !value.is_empty()).then_some((name, value))
        };
        Self {
            rank: rank.map(|place| RankEnv {
                rank: place.rank,
                local_rank: place.local_rank,
                world_size: place.world_size,
                local_world_size: place.local_world_size,
                master: place.master,
                source: place.source,
                token: Token {
                    text: text(TOKEN).filter(|token| !token.is_empty()),
                    file: path(TOKEN_FILE),
                },
                run_token: text(RUN_TOKEN).unwrap_or(place.job),
                job_dir: lookup(JOB_DIR).map(PathBuf::from),
                no_color: no_color(lookup),
            }),
            node,
            temp_dir,
            cache_dir,
            no_color: no_color(lookup),
            rust_log: text("RUST_LOG"),
            max_pixels: count("MAX_PIXELS"),
            min_pixels: count("MIN_PIXELS"),
            max_slice_nums: count("MAX_SLICE_NUMS"),
            mp_size: count("MP_SIZE"),
            gpus_per_worker: count("NUM_GPUS_PER_WORKER"),
            unusable: Self::STAND_INS
                .iter()
                .filter_map(|(name, _)| unusable(name))
                .collect(),
            now: SystemTime::now(),
        }
    }
}

/// Copy of all environment variables of this process, by name. `launcher doctor` lists them.
#[derive(Debug, Clone, Default)]
pub struct Variables(BTreeMap<String, OsString>);

impl Variables {
    /// Copies the environment variables of this process, except those with names that are not UTF-8.
    pub fn read() -> Self {
        std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value)))
            .collect()
    }

    /// The value of the variable `name`. `None` if it is not set.
    pub fn get(&self, name: &str) -> Option<&OsStr> {
        self.0.get(name).map(OsString::as_os_str)
    }

    /// Implementation of matrix products that the variable [`MATMUL`] chooses; [`Matmul::Auto`] if it is not
    /// set.
    ///
    /// # Errors
    /// As [`Matmul::from_lookup`].
    pub fn matmul(&self) -> Result<Matmul, Failure> {
        Matmul::from_lookup(&|name| self.get(name).map(ToOwned::to_owned))
    }

    /// Whether the variable [`ATTENTION_BACKWARD`] chooses one kernel for attention's backward on GPUs: `fused` instead of
    /// `split`, which is the default.
    ///
    /// # Errors
    /// The variable has an invalid value (exit 2).
    pub fn fused_attention_backward(&self) -> Result<bool, Failure> {
        fused_attention_backward(&|name| self.get(name).map(ToOwned::to_owned))
    }

    /// How frozen host weights are copied to GPUs by the variable [`HOST_REGISTER`]; [`HostRegister::Auto`] if it is not set.
    ///
    /// # Errors
    /// As [`HostRegister::from_lookup`].
    pub fn host_register(&self) -> Result<HostRegister, Failure> {
        HostRegister::from_lookup(&|name| self.get(name).map(ToOwned::to_owned))
    }

    /// Architecture for the GPU kernels that the variable [`GPU_CODE`] chooses; [`GpuCode::Native`] if it is
    /// not set.
    ///
    /// # Errors
    /// As [`GpuCode::from_lookup`].
    pub fn gpu_code(&self) -> Result<GpuCode, Failure> {
        GpuCode::from_lookup(&|name| self.get(name).map(ToOwned::to_owned))
    }

    /// Directory for files that can be generated again, the same as [`Env::cache_dir`].
    pub fn cache_dir(&self) -> PathBuf {
        cache_dir(&|name| {
            let value = self.get(name).filter(|value| !value.is_empty());
            value.map(PathBuf::from)
        })
    }

    /// Names of all variables that are set, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }
}

impl FromIterator<(String, OsString)> for Variables {
    fn from_iter<T: IntoIterator<Item = (String, OsString)>>(pairs: T) -> Self {
        Self(pairs.into_iter().collect())
    }
}

/// Directories to search for CUDA's libraries, from environment variables.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CudaSearchPaths {
    /// Directories that [`CUDA_LIBS`] names.
    pub directories: Vec<PathBuf>,
    /// Directory of an installed CUDA toolkit: `CUDA_HOME`, or else `CUDA_PATH`.
    pub cuda_home: Option<PathBuf>,
    /// Root directories of Python environments: `VIRTUAL_ENV`, `CONDA_PREFIX`, and `.local` in `HOME`.
    pub python_environments: Vec<PathBuf>,
    /// Directories that `PYTHONPATH` names.
    pub python_path: Vec<PathBuf>,
}

impl CudaSearchPaths {
    /// Reads the variables that name directories of CUDA's libraries. `lookup` returns the value of a
    /// variable by name.
    pub fn from_lookup(lookup: &dyn Fn(&str) -> Option<OsString>) -> Self {
        let path = |name: &str| {
            lookup(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        let list = |name: &str| -> Vec<PathBuf> {
            let value = lookup(name).unwrap_or_default();
            std::env::split_paths(&value)
                .filter(|directory| !directory.as_os_str().is_empty())
                .collect()
        };
        Self {
            directories: list(CUDA_LIBS),
            cuda_home: path("CUDA_HOME").or_else(|| path("CUDA_PATH")),
            python_environments: [
                path("VIRTUAL_ENV"),
                path("CONDA_PREFIX"),
                path("HOME").map(|home| home.join(".local")),
            ]
            .into_iter()
            .flatten()
            .collect(),
            python_path: list("PYTHONPATH"),
        }
    }
}

fn temp_dir(path: &dyn Fn(&str) -> Option<PathBuf>) -> PathBuf {
    path("TMPDIR").unwrap_or_else(|| PathBuf::from("/tmp"))
}

fn cache_dir(path: &dyn Fn(&str) -> Option<PathBuf>) -> PathBuf {
    path("XDG_CACHE_HOME")
        .filter(|directory| directory.is_absolute())
        .or_else(|| path("HOME").map(|home| home.join(".cache")))
        .unwrap_or_else(|| temp_dir(path))
        .join("tessera")
}

fn no_color(lookup: &dyn Fn(&str) -> Option<OsString>) -> bool {
    lookup("NO_COLOR").is_some_and(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(vars: &[(&str, &str)]) -> Result<Env, Failure> {
        Env::from_lookup(&|name| {
            vars.iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn a_rank_reads_the_variables_of_its_supervisor() {
        let vars = [
            ("RANK", "1"),
            ("LOCAL_RANK", "1"),
            ("WORLD_SIZE", "2"),
            ("TESSERA_RUN_TOKEN", "abc"),
            ("TESSERA_JOB_DIR", "/job"),
        ];
        let rank = read(&vars).expect("reads").rank.expect("a rank");
        assert!(rank.is_supervised() && !rank.has_peers_elsewhere());
        assert_eq!(
            (&*rank.run_token, rank.job_dir),
            ("abc", Some("/job".into()))
        );
        let rank = read(&vars[..3]).expect("reads").rank.expect("a rank");
        assert!(!rank.is_supervised());
        assert_eq!(rank.run_token.len(), 24);
    }

    #[test]
    fn library_paths_are_read_as_lists_and_roots() {
        let vars = [
            ("TESSERA_CUDA_LIBS", "/a:/b::"),
            ("CUDA_HOME", ""),
            ("CUDA_PATH", "/opt/cuda"),
            ("CONDA_PREFIX", "/conda"),
            ("HOME", "/home/u"),
            ("PYTHONPATH", ":/p"),
        ];
        let places = CudaSearchPaths::from_lookup(&|name| {
            let found = vars.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| OsString::from(value))
        });
        let paths = |list: &[&str]| list.iter().map(PathBuf::from).collect::<Vec<_>>();
        assert_eq!(places.directories, paths(&["/a", "/b"]));
        assert_eq!(places.cuda_home, Some("/opt/cuda".into()));
        assert_eq!(
            places.python_environments,
            paths(&["/conda", "/home/u/.local"])
        );
        assert_eq!(places.python_path, paths(&["/p"]));
        assert_eq!(
            CudaSearchPaths::from_lookup(&|_| None),
            CudaSearchPaths::default()
        );
    }

    #[test]
    fn directories_follow_xdg_and_tmpdir() {
        let env = read(&[("HOME", "/home/u"), ("TMPDIR", "/scratch")]).expect("reads");
        assert_eq!(env.cache_dir, PathBuf::from("/home/u/.cache/tessera"));
        assert_eq!(env.temp_dir, PathBuf::from("/scratch"));
        let env = read(&[("XDG_CACHE_HOME", "/c"), ("NO_COLOR", "1")]).expect("reads");
        assert_eq!(env.cache_dir, PathBuf::from("/c/tessera"));
        assert!(env.no_color);
    }
}
