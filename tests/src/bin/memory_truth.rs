//! `memory_truth LAUNCHER DIRECTORY [FILTER]`: compares planned memory with the memory that the operating system
//! reports.
//!
//! It runs a grid of stage × offload × precision × adapters × accumulation × recompute. Every run also evaluates and
//! saves. LAUNCHER is the executable. DIRECTORY takes models, runs and spill files (about 4 GB). FILTER gives words
//! that the flags of a cell must contain. It exits with 1 when a plan is wrong.

use anyhow::{Context, Result};
use serde_json::json;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tests::memory::{measure, middle_sizes, model_directory, small_sizes};
use tests::tolerance;

/// Flags of every run: every stage with every kind of offload, with the other settings spread over them.
const CELLS: [(&str, &str); 18] = [
    ("middle", "--zero 0 --nproc 1 --precision f32"),
    ("middle", "--zero 0 --nproc 2 --precision bf16"),
    (
        "middle",
        "--zero 0 --nproc 2 --precision pure-bf16 --offload optimizer=cpu",
    ),
    (
        "middle",
        "--zero 1 --nproc 2 --precision bf16 --gradient-accumulation-steps 2",
    ),
    ("middle", "--zero 1 --nproc 2 --precision f32 --offload cpu"),
    (
        "middle",
        "--zero 2 --nproc 2 --precision pure-bf16 --checkpoint-activations none",
    ),
    (
        "middle",
        "--zero 2 --nproc 2 --precision bf16 --offload optimizer=cpu",
    ),
    (
        "middle",
        "--zero 3 --nproc 2 --precision f32 --checkpoint-activations none",
    ),
    (
        "middle",
        "--zero 3 --nproc 2 --precision bf16 --offload cpu",
    ),
    (
        "middle",
        "--zero 3 --nproc 2 --precision bf16 --offload nvme:SPILL --nvme-io direct",
    ),
    (
        "middle",
        "--zero 3 --nproc 2 --precision pure-bf16 --offload param=nvme:SPILL,optimizer=cpu --nvme-io direct",
    ),
    (
        "middle",
        "--zero 1 --nproc 2 --precision fp16 --offload optimizer=nvme:SPILL --nvme-io mapped",
    ),
    (
        "middle",
        "--zero 3 --nproc 2 --precision fp16 --gradient-accumulation-steps 2",
    ),
    (
        "middle",
        "--zero 3 --nproc 2 --precision bf16 --use-lora --modules-to-save embed_tokens,resampler",
    ),
    (
        "middle",
        "--zero 2 --nproc 2 --precision f32 --use-lora --modules-to-save embed_tokens,resampler --checkpoint-activations none",
    ),
    (
        "small",
        "--zero 3 --nproc 2 --precision bf16 --offload cpu --gradient-accumulation-steps 2",
    ),
    ("small", "--zero 1 --nproc 2 --precision pure-bf16"),
    (
        "small",
        "--zero 0 --nproc 1 --precision bf16 --checkpoint-activations none",
    ),
];

fn main() -> Result<ExitCode> {
    let mut words = std::env::args().skip(1);
    let usage = "memory_truth LAUNCHER FOLDER [FILTER]";
    let launcher = fs::canonicalize(words.next().context(usage)?)?;
    let directory = PathBuf::from(words.next().context(usage)?);
    let filter = words.next().unwrap_or_default();
    fs::create_dir_all(&directory)?;
    let directory = fs::canonicalize(directory)?;
    let pack = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/minicpm-v-2_6");
    for (name, sizes) in [("middle", middle_sizes()), ("small", small_sizes())] {
        model_directory(&pack, &directory.join(name), &sizes)?;
    }
    write_samples(&pack, &directory)?;
    let mut out = std::io::stdout();
    writeln!(
        out,
        "| model | flags | planned MiB | measured MiB | ratio | spill planned / measured MiB | true |"
    )?;
    writeln!(out, "|---|---|---|---|---|---|---|")?;
    let mut all_true = true;
    for (model, flags) in CELLS.iter().filter(|(_, flags)| flags.contains(&filter)) {
        let (output, spill) = (directory.join("run"), directory.join("spill"));
        for old in [&output, &spill] {
            fs::remove_dir_all(old).or_else(|e| match e.kind() {
                std::io::ErrorKind::NotFound => Ok(()),
                _ => Err(e),
            })?;
        }
        fs::create_dir_all(&spill)?;
        let line = format!(
            "--model {} --data {} --eval-data {} --output {} --init random --max-steps 3 --model-max-length 512 \
             --logging-steps 1 --save-steps 2 --eval-steps 2 --eval-strategy steps --save-total-limit 1 {}",
            directory.join(model).display(),
            directory.join("samples.json").display(),
            directory.join("samples.json").display(),
            output.display(),
            flags.replace("SPILL", &spill.display().to_string()),
        );
        let args: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let seen = measure(&launcher, &args, &output, Some(&spill))?;
        let mut holds = tolerance::memory(seen.planned_spilled, seen.spilled);
        // The table shows the rank with the largest difference from the plan.
        let (mut planned, mut measured) = (0, 0);
        let off =
            |planned: u64, measured: u64| (planned as f64 / measured.max(1) as f64).ln().abs();
        for (&plan, &rank) in seen.planned_resident.iter().zip(&seen.resident) {
            holds &= tolerance::memory(plan, rank);
            if measured == 0 || off(plan, rank) > off(planned, measured) {
                (planned, measured) = (plan, rank);
            }
        }
        all_true &= holds;
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        writeln!(
            out,
            "| {model} | `{flags}` | {:.0} | {:.0} | {:.3} | {:.0} / {:.0} | {} |",
            mib(planned),
            mib(measured),
            planned as f64 / measured.max(1) as f64,
            mib(seen.planned_spilled),
            mib(seen.spilled),
            if holds { "yes" } else { "NO" },
        )?;
        out.flush()?;
    }
    Ok(ExitCode::from(u8::from(!all_true)))
}

/// Writes samples of different lengths, with and without images.
fn write_samples(pack: &Path, directory: &Path) -> Result<()> {
    let image = pack.join("cases/wide_two_turns/image_wide.png");
    let samples: Vec<_> = (0..12)
        .map(|i| {
            let question = "what stands here and what does it mean? ".repeat(1 + i % 5);
            let mut sample = json!({
                "id": i.to_string(),
                "conversations": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": format!("It is {i}.")},
                ],
            });
            if i % 3 != 0 {
                sample["image"] = image.display().to_string().into();
            }
            sample
        })
        .collect();
    fs::write(
        directory.join("samples.json"),
        serde_json::to_vec(&samples)?,
    )?;
    Ok(())
}
