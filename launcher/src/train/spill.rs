//! Spill files of a rank: choice of the I/O method, measurement of the disk, creation of the files.

use crate::config::{NvmeIo, RunConfig};
use crate::error::{Failure, failures};
use crate::lang::{Text, both, text};
use crate::rank_env::RankEnv;
use crate::ui::{Event, Reporter};
use engine::comm::{Communicator, Tag};
use engine::spill::{IoPath, Measured, SpillDirectory, SpillError, SpillFile, SpillIo, measure};
use engine::{Plan, Spill, StateKind};
use kernels::Pool;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes written and read to measure one I/O method.
const MEASURE_BYTES: u64 = 96 << 20;

/// Spill files of one rank, and the measured speed of their disks.
#[derive(Debug)]
pub(crate) struct Disk {
    pub(crate) spill: Spill,
    /// This rank's share of the disks' bytes per second, with equal reads and writes. `None` without a measurement.
    pub(crate) ceiling: Option<f64>,
}

/// Creates the spill files of this rank. `None` if nothing is offloaded to nvme. All ranks call it.
pub(crate) fn open(
    config: &RunConfig,
    env: &RankEnv,
    plan: &Plan,
    host: &Pool,
    comm: &dyn Communicator,
    reporter: &Reporter,
) -> Result<Option<Disk>, Failure> {
    if config.offload.directories().is_empty() {
        return Ok(None);
    }
    let io = SpillIo::new(plan.spill_buffer_bytes(), host)
        .map_err(|e| failures::engine(both("set up spill files", "创建溢出文件"), &e))?;
    let mut ways: BTreeMap<PathBuf, (Arc<SpillDirectory>, IoPath)> = BTreeMap::new();
    let mut ceilings = Vec::new();
    for parent in config.offload.directories() {
        let directory = SpillDirectory::join(parent, &env.run_token).map_err(|e| failed(&e))?;
        let directory = Arc::new(directory);
        let measured = if env.rank == 0 {
            measured(config.nvme_io, &directory, &io)?
        } else {
            Vec::new()
        };
        let measured = shared(&measured, comm)?;
        let way = chosen(config.nvme_io, &measured).ok_or_else(|| no_direct(parent))?;
        if env.rank == 0 {
            reporter.emit(&Event::Info {
                label: both("nvme", "nvme").into(),
                text: described(parent, way, &measured),
            });
        }
        if let Some(own) = measured.iter().find(|m| m.io == way) {
            ceilings.push(balanced(own));
        }
        ways.insert(parent.to_owned(), (directory, way));
    }
    let kinds = [
        (StateKind::Param, &config.offload.param),
        (StateKind::Optimizer, &config.offload.optimizer),
        (StateKind::Activation, &config.offload.activation),
    ];
    let mut files = Vec::new();
    for (kind, tier) in kinds {
        let Some((directory, way)) = tier.directory().and_then(|parent| ways.get(parent)) else {
            continue;
        };
        let file = SpillFile::create(directory, env.rank, kind.name(), *way);
        files.push((kind, file.map_err(|e| failed(&e))?));
    }
    Ok(Some(Disk {
        spill: Spill::new(io, files),
        ceiling: (!ceilings.is_empty())
            .then(|| ceilings.iter().sum::<f64>() / config.ranks_here() as f64),
    }))
}

fn measured(
    asked: NvmeIo,
    directory: &Arc<SpillDirectory>,
    io: &SpillIo,
) -> Result<Vec<Measured>, Failure> {
    let ways: &[IoPath] = match asked {
        NvmeIo::Auto => &[IoPath::Direct, IoPath::Mapped],
        NvmeIo::Direct => &[IoPath::Direct],
        NvmeIo::Mapped => &[IoPath::Mapped],
    };
    let mut found = Vec::new();
    for way in ways {
        let result = measure(directory, *way, MEASURE_BYTES, io);
        found.extend(
            result.map_err(|e| {
                failures::engine(both("measure the spill disk", "测量溢出磁盘"), &e)
            })?,
        );
    }
    Ok(found)
}

/// Sends rank 0's measurements to every rank, so that all choose the same I/O method.
fn shared(measured: &[Measured], comm: &dyn Communicator) -> Result<Vec<Measured>, Failure> {
    let own = serde_json::to_vec(measured).unwrap_or_default();
    let all = comm
        .all_gather_bytes(&own, Tag::new("nvme", 0))
        .map_err(|e| failures::comm(&e))?;
    let first = all.into_iter().next().unwrap_or_default();
    Ok(serde_json::from_slice(&first).unwrap_or_default())
}

fn chosen(asked: NvmeIo, measured: &[Measured]) -> Option<IoPath> {
    match asked {
        NvmeIo::Mapped => Some(IoPath::Mapped),
        NvmeIo::Direct => measured.first().map(|m| m.io),
        NvmeIo::Auto => {
            let best = measured
                .iter()
                .max_by(|a, b| balanced(a).total_cmp(&balanced(b)));
            best.map_or(Some(IoPath::Mapped), |m| Some(m.io))
        }
    }
}

/// Bytes per second if equal amounts are read and written, as in an optimizer step.
fn balanced(measured: &Measured) -> f64 {
    2.0 / (1.0 / measured.read + 1.0 / measured.write)
}

fn described(parent: &Path, way: IoPath, measured: &[Measured]) -> Text {
    let rates: Vec<Text> = measured
        .iter()
        .map(|m| {
            text!(
                "{} reads {:.2} GB/s, writes {:.2}",
                "{} 读 {:.2} GB/s，写 {:.2}",
                m.io.name(),
                m.read / 1e9,
                m.write / 1e9
            )
        })
        .collect();
    text!(
        "{}: {} I/O ({})",
        "{}：{} I/O（{}）",
        parent.display(),
        way.name(),
        Text::join(&rates, "; ")
    )
}

fn no_direct(parent: &Path) -> Failure {
    Failure::usage(
        text!(
            "{} does not support direct I/O",
            "{} 不支持直接 I/O",
            parent.display()
        ),
        both(
            "its file system refuses O_DIRECT (tmpfs and some network file systems do)",
            "它的文件系统拒绝 O_DIRECT（tmpfs 和某些网络文件系统如此）",
        ),
    )
    .next(both(
        "use --nvme-io mapped, or a directory on a local disk",
        "请使用 --nvme-io mapped，或本地磁盘上的目录",
    ))
}

fn failed(error: &SpillError) -> Failure {
    failures::spill(both("set up spill files", "创建溢出文件"), error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_io_path_with_the_faster_step_is_chosen() {
        let of = |io, read, write| Measured { io, read, write };
        let direct = of(IoPath::Direct, 2e9, 2e9);
        let mapped = of(IoPath::Mapped, 9e9, 0.5e9);
        assert_eq!(
            chosen(NvmeIo::Auto, &[direct, mapped]),
            Some(IoPath::Direct)
        );
        assert_eq!(chosen(NvmeIo::Auto, &[mapped]), Some(IoPath::Mapped));
        assert_eq!(chosen(NvmeIo::Direct, &[]), None);
        assert!((balanced(&direct) - 2e9).abs() < 1.0);
        let text = described(Path::new("/d"), IoPath::Direct, &[direct, mapped]);
        assert_eq!(
            text,
            "/d: direct I/O (direct reads 2.00 GB/s, writes 2.00; mapped reads 9.00 GB/s, writes 0.50)"
        );
    }
}
