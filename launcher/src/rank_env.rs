//! The only reader of the environment. Everything else receives values.
//!
//! `LOCAL_RANK` decides: where it is set, this process is a rank and never spawns; where it is
//! not, this process is the supervisor.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::time::SystemTime;

use crate::exit::{ErrorCode, Failure};

/// Rank number over all nodes.
pub const RANK: &str = "RANK";
/// Rank number on this node.
pub const LOCAL_RANK: &str = "LOCAL_RANK";
/// Number of ranks.
pub const WORLD_SIZE: &str = "WORLD_SIZE";
/// Number of ranks on this node.
pub const LOCAL_WORLD_SIZE: &str = "LOCAL_WORLD_SIZE";
/// Where rank 0 listens.
pub const MASTER_ADDR: &str = "MASTER_ADDR";
/// Which port rank 0 listens on.
pub const MASTER_PORT: &str = "MASTER_PORT";
/// Token in the names of all shared files of one job; set by our supervisor only.
pub const RUN_TOKEN: &str = "TESSERA_RUN_TOKEN";
/// Folder of the job's private files; set by our supervisor only.
pub const JOB_DIR: &str = "TESSERA_JOB_DIR";
/// Folders with CUDA's libraries, separated by colons; looked at before all others.
pub const CUDA_LIBS: &str = "TESSERA_CUDA_LIBS";

/// Identity of one rank process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankEnv {
    /// Rank over all nodes.
    pub rank: usize,
    /// Rank on this node.
    pub local_rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Number of ranks on this node.
    pub local_world_size: usize,
    /// Address of the rendezvous.
    pub master_addr: String,
    /// Port of the rendezvous. Under torchrun its agent listens there: derive, do not bind.
    pub master_port: u16,
    /// Goes into the names of shared-memory and temporary files, so that they can be swept.
    pub run_token: String,
    /// Private folder of the job, where our supervisor started this rank.
    pub job_dir: Option<PathBuf>,
    /// Whether `NO_COLOR` asks for plain text.
    pub no_color: bool,
}

impl RankEnv {
    /// Whether our own supervisor started this rank, watches it and draws its screen.
    pub fn is_supervised(&self) -> bool {
        self.job_dir.is_some()
    }
}

/// What the environment says, read once at start.
#[derive(Debug, Clone)]
pub struct Env {
    /// Rank identity; absent in the supervisor.
    pub rank: Option<RankEnv>,
    /// Folder for temporary files.
    pub temp_dir: PathBuf,
    /// Folder for files that may be drawn again at any time.
    pub cache_dir: PathBuf,
    /// Whether `NO_COLOR` asks for plain text.
    pub no_color: bool,
    /// Log filter of `RUST_LOG`.
    pub rust_log: Option<String>,
    /// Start of this process, for names of run folders.
    pub now: SystemTime,
}

impl Env {
    /// Reads the process environment.
    ///
    /// # Errors
    /// Rank variables are incomplete or contradict each other (exit 13).
    pub fn read() -> Result<Self, Failure> {
        Self::from_lookup(&|name| std::env::var_os(name))
    }

    /// Reads an environment through `lookup`.
    ///
    /// # Errors
    /// As [`Env::read`].
    pub fn from_lookup(lookup: &dyn Fn(&str) -> Option<OsString>) -> Result<Self, Failure> {
        let path = |name: &str| {
            lookup(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        let temp_dir = path("TMPDIR").unwrap_or_else(|| PathBuf::from("/tmp"));
        let cache_dir = path("XDG_CACHE_HOME")
            .filter(|folder| folder.is_absolute())
            .or_else(|| path("HOME").map(|home| home.join(".cache")))
            .unwrap_or_else(|| temp_dir.clone())
            .join("tessera");
        Ok(Self {
            rank: rank_from(lookup)?,
            temp_dir,
            cache_dir,
            no_color: no_color(lookup),
            rust_log: lookup("RUST_LOG").and_then(|value| value.into_string().ok()),
            now: SystemTime::now(),
        })
    }
}

/// Every variable of the process, for the report of `launcher doctor`.
#[derive(Debug, Clone, Default)]
pub struct Variables(BTreeMap<String, OsString>);

impl Variables {
    /// Reads the process environment; names that are no text are left out.
    pub fn read() -> Self {
        std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value)))
            .collect()
    }

    /// The value of one variable.
    pub fn get(&self, name: &str) -> Option<&OsStr> {
        self.0.get(name).map(OsString::as_os_str)
    }

    /// The names of all that are set, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }
}

impl FromIterator<(String, OsString)> for Variables {
    fn from_iter<T: IntoIterator<Item = (String, OsString)>>(pairs: T) -> Self {
        Self(pairs.into_iter().collect())
    }
}

/// Where the environment says that CUDA's libraries may lie.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CudaPlaces {
    /// Folders of [`CUDA_LIBS`].
    pub directories: Vec<PathBuf>,
    /// An installed toolkit: `CUDA_HOME`, or `CUDA_PATH`.
    pub cuda_home: Option<PathBuf>,
    /// Python environments: `VIRTUAL_ENV`, `CONDA_PREFIX`, and the user's own under `HOME`.
    pub python_environments: Vec<PathBuf>,
    /// Folders of `PYTHONPATH`.
    pub python_path: Vec<PathBuf>,
}

impl CudaPlaces {
    /// Reads an environment through `lookup`.
    pub fn from_lookup(lookup: &dyn Fn(&str) -> Option<OsString>) -> Self {
        let path = |name: &str| {
            lookup(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        let list = |name: &str| -> Vec<PathBuf> {
            let value = lookup(name).unwrap_or_default();
            std::env::split_paths(&value)
                .filter(|folder| !folder.as_os_str().is_empty())
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

fn rank_from(lookup: &dyn Fn(&str) -> Option<OsString>) -> Result<Option<RankEnv>, Failure> {
    let world_size = number(lookup, WORLD_SIZE)?;
    let Some(local_rank) = number(lookup, LOCAL_RANK)? else {
        return match world_size {
            Some(world) if world > 1 => Err(rendezvous(
                format!("{WORLD_SIZE}={world} is set but {LOCAL_RANK} is not"),
                "some schedulers count nodes this way; jobs over several nodes are not available yet",
            )
            .next("run one rank per process under torchrun, or unset RANK and WORLD_SIZE to let this program start its ranks")),
            _ => Ok(None),
        };
    };
    let needed = |name: &str, value: Option<usize>| {
        value.ok_or_else(|| {
            rendezvous(
                format!("{LOCAL_RANK}={local_rank} is set but {name} is not"),
                "a rank needs its full identity",
            )
            .next("start with `launcher --nproc N`, torchrun, or set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT")
        })
    };
    let rank = needed(RANK, number(lookup, RANK)?)?;
    let world_size = needed(WORLD_SIZE, world_size)?;
    let local_world_size = number(lookup, LOCAL_WORLD_SIZE)?.unwrap_or(world_size);
    if rank >= world_size || local_rank >= local_world_size || local_world_size > world_size {
        return Err(rendezvous(
            "the rank variables contradict each other".to_string(),
            "a rank must be smaller than its world",
        )
        .evidence(format!(
            "{RANK}={rank} {WORLD_SIZE}={world_size} {LOCAL_RANK}={local_rank} {LOCAL_WORLD_SIZE}={local_world_size}"
        )));
    }
    if local_world_size != world_size {
        return Err(rendezvous(
            format!("{world_size} ranks on several nodes"),
            "ranks meet through shared memory today; several nodes are not available yet",
        )
        .evidence(format!(
            "{WORLD_SIZE}={world_size} {LOCAL_WORLD_SIZE}={local_world_size}"
        ))
        .next("run all ranks on one node"));
    }
    let text = |name: &str| lookup(name).and_then(|value| value.into_string().ok());
    let master_addr = text(MASTER_ADDR).unwrap_or_else(|| "127.0.0.1".to_string());
    let port = number(lookup, MASTER_PORT)?.unwrap_or(29500);
    let master_port =
        u16::try_from(port).map_err(|_| not_a_number(MASTER_PORT, &port.to_string()))?;
    // Ranks of a foreign launcher agree on a token through what they all know.
    let run_token = text(RUN_TOKEN).unwrap_or_else(|| {
        let id = text("TORCHELASTIC_RUN_ID").unwrap_or_default();
        let restart = text("TORCHELASTIC_RESTART_COUNT").unwrap_or_default();
        let key = format!("{master_addr}:{master_port}:{id}:{restart}");
        blake3::hash(key.as_bytes()).to_hex()[..24].to_string()
    });
    Ok(Some(RankEnv {
        rank,
        local_rank,
        world_size,
        local_world_size,
        master_addr,
        master_port,
        run_token,
        job_dir: lookup(JOB_DIR).map(PathBuf::from),
        no_color: no_color(lookup),
    }))
}

fn no_color(lookup: &dyn Fn(&str) -> Option<OsString>) -> bool {
    lookup("NO_COLOR").is_some_and(|value| !value.is_empty())
}

fn number(lookup: &dyn Fn(&str) -> Option<OsString>, name: &str) -> Result<Option<usize>, Failure> {
    let Some(value) = lookup(name) else {
        return Ok(None);
    };
    let text = value.to_string_lossy();
    text.trim()
        .parse()
        .map(Some)
        .map_err(|_| not_a_number(name, &text))
}

fn not_a_number(name: &str, value: &str) -> Failure {
    rendezvous(
        format!("environment variable {name}={value:?} is not a number in range"),
        "rank variables are whole numbers",
    )
}

fn rendezvous(title: String, cause: &str) -> Failure {
    Failure::new(ErrorCode::Rendezvous, title, cause)
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
    fn without_local_rank_the_process_is_a_supervisor() {
        assert_eq!(read(&[]).expect("reads").rank, None);
        assert_eq!(read(&[("WORLD_SIZE", "1")]).expect("reads").rank, None);
        let failure = read(&[("WORLD_SIZE", "4"), ("RANK", "1")]).expect_err("node level");
        assert_eq!(failure.code.status(), 13);
    }

    #[test]
    fn torchrun_variables_make_a_rank_that_agrees_on_a_token() {
        let vars = |rank| {
            [
                ("RANK", rank),
                ("LOCAL_RANK", rank),
                ("WORLD_SIZE", "2"),
                ("MASTER_PORT", "1234"),
            ]
        };
        let first = read(&vars("0")).expect("reads").rank.expect("a rank");
        let second = read(&vars("1")).expect("reads").rank.expect("a rank");
        assert_eq!(
            (second.rank, second.world_size, second.local_world_size),
            (1, 2, 2)
        );
        assert_eq!(first.run_token, second.run_token);
        assert!(!first.is_supervised());
    }

    #[test]
    fn incomplete_or_contradicting_identity_is_refused() {
        for vars in [
            vec![("LOCAL_RANK", "0")],
            vec![("LOCAL_RANK", "0"), ("RANK", "0")],
            vec![("LOCAL_RANK", "0"), ("RANK", "2"), ("WORLD_SIZE", "2")],
            vec![("LOCAL_RANK", "x"), ("RANK", "0"), ("WORLD_SIZE", "2")],
            vec![
                ("LOCAL_RANK", "0"),
                ("RANK", "0"),
                ("WORLD_SIZE", "4"),
                ("LOCAL_WORLD_SIZE", "2"),
            ],
            vec![
                ("LOCAL_RANK", "0"),
                ("RANK", "0"),
                ("WORLD_SIZE", "1"),
                ("MASTER_PORT", "70000"),
            ],
        ] {
            assert_eq!(
                read(&vars).expect_err("refused").code.status(),
                13,
                "{vars:?}"
            );
        }
    }

    #[test]
    fn places_of_libraries_are_lists_and_roots() {
        let vars = [
            ("TESSERA_CUDA_LIBS", "/a:/b::"),
            ("CUDA_HOME", ""),
            ("CUDA_PATH", "/opt/cuda"),
            ("CONDA_PREFIX", "/conda"),
            ("HOME", "/home/u"),
            ("PYTHONPATH", ":/p"),
        ];
        let places = CudaPlaces::from_lookup(&|name| {
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
        assert_eq!(CudaPlaces::from_lookup(&|_| None), CudaPlaces::default());
    }

    #[test]
    fn folders_follow_the_usual_variables() {
        let env = read(&[("HOME", "/home/u"), ("TMPDIR", "/scratch")]).expect("reads");
        assert_eq!(env.cache_dir, PathBuf::from("/home/u/.cache/tessera"));
        assert_eq!(env.temp_dir, PathBuf::from("/scratch"));
        let env = read(&[("XDG_CACHE_HOME", "/c"), ("NO_COLOR", "1")]).expect("reads");
        assert_eq!(env.cache_dir, PathBuf::from("/c/tessera"));
        assert!(env.no_color);
    }
}
