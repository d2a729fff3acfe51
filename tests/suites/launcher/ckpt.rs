//! `launcher ckpt`: intact checkpoints, and every kind of damage.

use crate::site::{Site, assert_says, listing, losses, read_json};
use engine::checkpoint::Checkpoint;
use half::bf16;
use kernels::DType;
use models::WeightSource;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Output and exit status of a subcommand.
struct Answer {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

/// Runs `launcher ckpt LINE` in the site's directory.
fn ckpt(site: &Site, line: &str) -> Answer {
    let output = Command::new(env!("CARGO_BIN_EXE_tessera_test_launcher"))
        .env("LC_ALL", "C")
        .arg("ckpt")
        .args(line.split_whitespace())
        .current_dir(site.path(""))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Answer {
        code: output.status.code(),
        stdout: text(output.stdout),
        stderr: text(output.stderr),
    }
}

pub(crate) fn done(site: &Site, line: &str) -> String {
    let answer = ckpt(site, line);
    assert_eq!(answer.code, Some(0), "{line}\n{}", answer.stderr);
    answer.stdout
}

/// Expects the subcommand to fail with this status and these words.
fn refused(site: &Site, line: &str, status: i32, words: &[&str]) {
    let answer = ckpt(site, line);
    assert_eq!(answer.code, Some(status), "{line}\n{}", answer.stderr);
    assert_says(&answer.stderr, words);
    assert_says(&answer.stderr, &["  cause     ", "  next      "]);
}

/// Every file below a directory with its bytes.
fn files(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut directories = vec![directory.to_owned()];
    while let Some(inner) = directories.pop() {
        for entry in fs::read_dir(inner).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                directories.push(path);
            } else {
                let relative = path.strip_prefix(directory).unwrap().to_owned();
                found.insert(relative, fs::read(path).unwrap());
            }
        }
    }
    found
}

fn write_all(directory: &Path, files: &BTreeMap<PathBuf, Vec<u8>>) {
    for (relative, bytes) in files {
        let path = directory.join(relative);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
}

#[test]
fn a_run_is_listed_with_the_contents_of_its_checkpoints() {
    let site = Site::new();
    site.train("--save-steps 1 --precision bf16 --zero 2");
    fs::create_dir(site.path("out/checkpoint-3.tmp")).unwrap();
    let list = || -> Value { serde_json::from_str(&done(&site, "ls out --json")).unwrap() };
    let all = list();
    assert_eq!(all["latest"], json!("checkpoint-2"));
    let rows = all["checkpoints"].as_array().unwrap();
    let names: Vec<&Value> = rows.iter().map(|row| &row["name"]).collect();
    assert_eq!(names, ["checkpoint-1", "checkpoint-2", "checkpoint-3.tmp"]);
    for (row, step) in rows.iter().zip(1..3) {
        let expected = json!({"step": step, "whole": true, "world_size": 2, "zero": 2,
            "precision": "bf16", "holds": ["model", "state"], "steps_done": step});
        for (key, value) in expected.as_object().unwrap() {
            assert_eq!(&row[key], value, "{key} of {row}");
        }
        let directory = site.path(&format!("out/checkpoint-{step}"));
        let bytes: usize = files(&directory).values().map(Vec::len).sum();
        assert_eq!(row["bytes"], json!(bytes));
        let state = &row["state"];
        let kinds: Vec<&String> = state.as_object().unwrap().keys().collect();
        assert_eq!(kinds, ["exp_avg", "exp_avg_sq", "master"]);
        let of = |directory: &Path, stem| WeightSource::open_stem(directory, stem).unwrap();
        let trained = of(&directory, "model").names().count();
        assert_eq!(state["master"]["tensors"], json!(trained));
    }
    assert_eq!(rows[2]["whole"], json!(false));
    let text = done(&site, "ls out");
    assert_says(&text, &["intact, the latest", "left by an unfinished save"]);
    let text = done(&site, "ls out/checkpoint-1");
    assert_says(&text, &["model + state", "exp_avg_sq", " intact\n"]);

    let state = site.path("out/checkpoint-1/state/rank-0000.safetensors");
    let bytes = fs::read(&state).unwrap();
    fs::write(&state, &bytes[..bytes.len() - 1]).unwrap();
    let row = &list()["checkpoints"][0];
    assert_eq!(row["whole"], json!(false));
    let problem = row["problem"].as_str().unwrap();
    assert!(problem.contains("rank-0000.safetensors"), "{problem}");

    refused(
        &site,
        "ls data",
        9,
        &["error[E08]", "contains no checkpoint"],
    );
    refused(
        &site,
        "ls nowhere",
        9,
        &["error[E08]", "the directory does not exist"],
    );
    refused(
        &site,
        "lst out",
        2,
        &["`ls`, `verify`, `reshard`, `consolidate`"],
    );
}

/// A change of the files in a checkpoint's directory.
type Damage = fn(&Path);

/// Kinds of damage, each with the files that the report must name.
fn damages() -> Vec<(&'static str, Damage, &'static [&'static str])> {
    fn flip(path: &Path) {
        let mut bytes = fs::read(path).unwrap();
        let last = bytes.len() - 1;
        bytes[last / 2] ^= 0x04;
        fs::write(path, bytes).unwrap();
    }
    vec![
        (
            "a flipped bit",
            |directory| flip(&directory.join("state/rank-0001.safetensors")),
            &["rank-0001.safetensors is damaged"],
        ),
        (
            "two bad files",
            |directory| {
                flip(&directory.join("state/rank-0000.safetensors"));
                flip(&directory.join("config.json"));
            },
            &["config.json is damaged", "rank-0000.safetensors is damaged"],
        ),
        (
            "a truncated shard",
            |directory| {
                let path = directory.join("state/rank-0000.safetensors");
                let bytes = fs::read(&path).unwrap();
                fs::write(path, &bytes[..bytes.len() / 3]).unwrap();
            },
            &["rank-0000.safetensors has "],
        ),
        (
            "a deleted shard",
            |directory| fs::remove_file(directory.join("state/rank-0001.safetensors")).unwrap(),
            &["rank-0001.safetensors is missing"],
        ),
        (
            "exchanged shards",
            |directory| {
                let [a, b, c] = ["0000", "0001", "swap"]
                    .map(|n| directory.join(format!("state/rank-{n}.safetensors")));
                fs::rename(&a, &c).unwrap();
                fs::rename(&b, &a).unwrap();
                fs::rename(&c, &b).unwrap();
            },
            &["rank-0000.safetensors ", "rank-0001.safetensors "],
        ),
        (
            "a deleted model",
            |directory| fs::remove_file(directory.join("model.safetensors")).unwrap(),
            &["model.safetensors is missing"],
        ),
        (
            "a deleted manifest",
            |directory| fs::remove_file(directory.join("MANIFEST.json")).unwrap(),
            &["MANIFEST.json is missing"],
        ),
        (
            "a changed manifest",
            |directory| flip(&directory.join("MANIFEST.json")),
            &["MANIFEST.json"],
        ),
    ]
}

#[test]
fn every_kind_of_damage_is_named_and_refused_everywhere() {
    let site = Site::new();
    site.train("--save-steps 1");
    let text = done(&site, "verify out/checkpoint-2");
    assert_says(&text, &["checkpoint-2 is intact"]);
    let text = done(&site, "verify out");
    assert_says(&text, &["checkpoint-2 is intact"]);
    done(&site, "consolidate --output whole out");
    let last = site.path("out/checkpoint-2");
    let whole = files(&last);
    for (what, damage, named) in damages() {
        damage(&last);
        println!("{what}");
        let mut words = vec![
            "error[E08]",
            "checkpoint-1 is the newest intact checkpoint",
            "out/checkpoint-1",
        ];
        words.extend(named);
        refused(&site, "verify out/checkpoint-2", 9, &words);
        for subcommand in ["reshard --nproc 3", "consolidate"] {
            let line = format!("{subcommand} --output made out/checkpoint-2");
            // The first damaged file is enough for a refusal.
            let answer = ckpt(&site, &line);
            assert_eq!(answer.code, Some(9), "{line}\n{}", answer.stderr);
            let said = named.iter().any(|file| answer.stderr.contains(file));
            assert!(said, "{line}\n{}", answer.stderr);
            assert!(
                !listing(&site.path(""))
                    .iter()
                    .any(|n| n.starts_with("made"))
            );
        }
        if named[0].starts_with("MANIFEST.json is missing") {
            // A directory without a manifest is no checkpoint, so it is not the latest one.
            let line = "--resume out/checkpoint-2 --output next --max-steps 3";
            assert_says(&site.refuse(line, 9, "E08"), &words);
        } else {
            words.truncate(4);
            assert_says(
                &site.refuse("--max-steps 3 --resume auto", 9, "E08"),
                &words,
            );
        }
        fs::remove_dir_all(&last).unwrap();
        write_all(&last, &whole);
    }
    done(&site, "verify out/checkpoint-2");
}

#[test]
fn a_copied_step_is_not_taken_for_another() {
    let site = Site::new();
    site.train("--save-steps 1");
    let (first, copy) = (site.path("out/checkpoint-1"), site.path("out/checkpoint-5"));
    write_all(&copy, &files(&first));
    fs::write(site.path("out/latest"), "").unwrap();
    let words = ["error[E08]", "the folder's name", "out/checkpoint-2"];
    refused(&site, "verify out/checkpoint-5", 9, &words);
    assert_says(
        &site.refuse("--resume auto --max-steps 6", 9, "E08"),
        &words,
    );
    let text = done(&site, "ls out");
    assert_says(&text, &["damaged: ", "the folder's name"]);
    // Without the copy an empty `latest` is ignored.
    fs::remove_dir_all(copy).unwrap();
    let outcome = site.train("--resume auto --max-steps 3");
    assert_says(&outcome.screen, &["continues after step 2"]);
}

#[test]
fn resharding_there_and_back_gives_the_same_bytes() {
    for line in [
        "--precision bf16",
        "--precision pure-bf16 --pure-bf16-moments f32",
        "--use-lora true --lora-rank 4",
        "--precision f32 --moments 8bit",
    ] {
        let site = Site::new();
        site.train(&format!("{line} --max-steps 3 --save-steps 2"));
        let original = files(&site.path("out/checkpoint-2"));
        let mut from = "out/checkpoint-2".to_owned();
        for nproc in [3, 1, 7, 2] {
            let to = format!("cut-{nproc}");
            done(
                &site,
                &format!("reshard {from} --nproc {nproc} --output {to}"),
            );
            let cut = site.path(&to);
            done(&site, &format!("verify {to}"));
            let checkpoint = Checkpoint::open(&cut).unwrap();
            assert_eq!(checkpoint.world_size(), nproc);
            assert_eq!(listing(&cut.join("state")).len(), 2 * nproc as usize);
            from = to;
        }
        assert!(files(&site.path("cut-2")) == original, "{line}");
        // A run of one rank continues from either checkpoint with the same bits.
        let rest = format!("{line} --nproc 1 --per-device-train-batch-size 2 --max-steps 3");
        site.train(&format!("{rest} --resume cut-1 --output a"));
        site.train(&format!("{rest} --resume out/checkpoint-2 --output b"));
        assert_eq!(losses(&site.path("a")), losses(&site.path("b")));
        refused(
            &site,
            "reshard out/checkpoint-2 --nproc 4 --output out",
            2,
            &["error[E09]", "never overwrites"],
        );
        refused(
            &site,
            "reshard out/checkpoint-2 --nproc 0 --output x",
            2,
            &["--nproc"],
        );
    }
}

/// The states have the names of bitsandbytes, and `map[code] * absmax` is a moment.
#[test]
fn consolidated_moments_of_8_bits_are_the_states_of_bitsandbytes() {
    let site = Site::new();
    site.train("--precision f32 --moments 8bit");
    done(
        &site,
        "consolidate out/checkpoint-2 --output wide --optimizer",
    );
    let checkpoint = Checkpoint::open(&site.path("out/checkpoint-2")).unwrap();
    let file = fs::read(site.path("wide/optimizer.safetensors")).unwrap();
    let states = SafeTensors::deserialize(&file).unwrap();
    let mut counts = [0, 0];
    for tensor in checkpoint.tensors() {
        let (kind, map, values) = match tensor.kind.as_str() {
            "exp_avg" => ("state1", "qmap1", &kernels::dynamic_map::SIGNED),
            "exp_avg_sq" => ("state2", "qmap2", &kernels::dynamic_map::UNSIGNED),
            _ => continue,
        };
        let of = |state: &str| states.tensor(&format!("{}.{state}", tensor.name));
        let raw = |kind: &str, elems: u64, size: usize| {
            let mut raw = vec![0; elems as usize * size];
            let read = checkpoint.read(kind, &tensor.name, 0..elems, &mut raw);
            read.unwrap();
            raw
        };
        let elems: u64 = tensor.shape.iter().product();
        let written = of(kind).unwrap();
        assert_eq!(
            written.data(),
            raw(&tensor.kind, elems, tensor.dtype.size_bytes())
        );
        let has_codes = tensor.dtype == DType::U8;
        counts[usize::from(has_codes)] += 1;
        let dtype = if has_codes { Dtype::U8 } else { Dtype::F32 };
        assert_eq!(written.dtype(), dtype, "{}", tensor.name);
        let absmax = of(&kind.replace("state", "absmax"));
        assert_eq!(absmax.is_ok(), has_codes, "{}", tensor.name);
        if let Ok(absmax) = absmax {
            let stored = format!("{}_absmax", tensor.kind);
            assert_eq!(absmax.data(), raw(&stored, elems.div_ceil(256), 4));
            assert_eq!(f32s(of(map).unwrap().data()), values);
        }
    }
    assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    let quads = bytes.chunks_exact(4);
    quads
        .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
        .collect()
}

#[test]
fn consolidated_weights_are_the_master_weights() {
    let site = Site::new();
    site.train("--precision bf16 --learning-rate 1e-5");
    let line = "consolidate out/checkpoint-2 --output wide --optimizer --max-shard-size 1MiB";
    assert_says(
        &done(&site, line),
        &["in f32", "weights from the training state"],
    );
    let checkpoint = Checkpoint::open(&site.path("out/checkpoint-2")).unwrap();
    let [own, wide] = ["out/checkpoint-2", "wide"]
        .map(|directory| WeightSource::open(&site.path(directory)).unwrap());
    assert!(own.names().eq(wide.names()));
    assert!(
        wide.files().count() > 1,
        "one file in spite of --max-shard-size"
    );
    let mut finer = 0;
    for name in wide.names() {
        assert_eq!(wide.dtype(name), Some(DType::F32), "{name}");
        assert_eq!(wide.shape(name), own.shape(name), "{name}");
        let values = f32s(&wide.read(name, DType::F32).unwrap());
        let mut master = vec![0; 4 * values.len()];
        checkpoint
            .read("master", name, 0..values.len() as u64, &mut master)
            .unwrap();
        assert!(f32s(&master) == values, "{name} is not its master");
        let stored = f32s(&own.read(name, DType::F32).unwrap());
        for (value, stored) in values.iter().zip(&stored) {
            // The checkpoint's weight file has the rounded weights that the model computes with.
            let rounded = bf16::from_f32(*value).to_f32();
            finer += usize::from(rounded != *value);
            assert!(
                rounded == *stored || *value == *stored,
                "{name}: {value} {stored}"
            );
        }
    }
    assert!(finer > 0, "masters hold no more than bf16");
    let moments = WeightSource::open_stem(&site.path("wide"), "optimizer").unwrap();
    let expected = 2 * wide.names().count();
    assert_eq!(moments.names().count(), expected);
    for name in wide.names() {
        let values = f32s(
            &moments
                .read(&format!("{name}.exp_avg"), DType::F32)
                .unwrap(),
        );
        let mut raw = vec![0; 4 * values.len()];
        checkpoint
            .read("exp_avg", name, 0..values.len() as u64, &mut raw)
            .unwrap();
        assert!(f32s(&raw) == values, "{name}");
        assert_eq!(
            moments.shape(&format!("{name}.exp_avg_sq")),
            wide.shape(name)
        );
    }
    // The output is a model directory with the checkpoint's small files, and it can be trained.
    assert!(site.path("wide/tokenizer.json").is_file());
    assert!(!site.path("wide/trainer_state.json").exists());
    site.train("--model wide --output next --max-steps 1");
    refused(
        &site,
        "consolidate out/checkpoint-2 --output wide",
        2,
        &["error[E09]"],
    );
    refused(
        &site,
        "consolidate out/checkpoint-2",
        2,
        &["--output is missing"],
    );
}

#[test]
fn consolidated_adapters_and_parts_keep_their_files() {
    let site = Site::new();
    site.train("--use-lora true --lora-rank 4 --precision pure-bf16 --output lora");
    site.train("--train resampler --precision bf16 --output part");
    for (run, stem) in [("lora", "adapter_model"), ("part", "trained")] {
        done(&site, &format!("verify {run}/checkpoint-2"));
        done(
            &site,
            &format!("consolidate {run}/checkpoint-2 --output {run}-wide"),
        );
        let open =
            |directory: String| WeightSource::open_stem(&site.path(&directory), stem).unwrap();
        let (own, wide) = (
            open(format!("{run}/checkpoint-2")),
            open(format!("{run}-wide")),
        );
        assert!(own.names().eq(wide.names()), "{run}");
        assert!(
            wide.names()
                .all(|name| wide.dtype(name) == Some(DType::F32))
        );
        for name in own.names() {
            let [a, b] = [&own, &wide].map(|s| {
                f32s(
                    &s.read(name, DType::BF16)
                        .map(|b| {
                            b.chunks_exact(2)
                                .flat_map(|h| {
                                    bf16::from_le_bytes([h[0], h[1]]).to_f32().to_le_bytes()
                                })
                                .collect::<Vec<u8>>()
                        })
                        .unwrap(),
                )
            });
            assert!(a == b, "{run}: {name}");
        }
    }
    assert!(site.path("lora-wide/adapter_config.json").is_file());
    let meta = read_json(&site.path("lora/checkpoint-2/MANIFEST.json"));
    let units = meta["meta"]["units"].as_array().unwrap();
    assert!(
        units
            .iter()
            .all(|unit| !unit.as_array().unwrap().is_empty())
    );
}

#[test]
fn the_best_checkpoint_survives_and_stands_for_the_run() {
    let site = Site::new();
    let often = "--eval-data data/samples.json --eval-steps 1 --nproc 1 --save-total-limit 1 --lr-scheduler-type constant";
    // The loss falls, so the greatest is that of the first step.
    let best =
        "--load-best-model-at-end --metric-for-best-model eval_loss --greater-is-better true";
    let screen = site
        .train(&format!("{often} {best} --max-steps 4 --output kept"))
        .screen;
    assert_says(&screen, &["checkpoint-1 · eval_loss", "export of this run"]);
    let kept = listing(&site.path("kept"));
    let kept: Vec<&String> = kept
        .iter()
        .filter(|name| name.starts_with("checkpoint-"))
        .collect();
    assert_eq!(kept, ["checkpoint-1", "checkpoint-4"]);
    let state = read_json(&site.path("kept/trainer_state.json"));
    assert_eq!(state["best_global_step"], 1);
    let named = state["best_model_checkpoint"].as_str().unwrap();
    assert!(named.ends_with("kept/checkpoint-1"), "{named}");
    // The run's directory means the best checkpoint to export, and the latest to --resume.
    let export = |of: &str, to: &str| {
        let exported = Command::new(env!("CARGO_BIN_EXE_tessera_test_launcher"))
            .args(["export", of, "--output", to])
            .current_dir(site.path("."))
            .output()
            .unwrap();
        assert!(exported.status.success(), "{exported:?}");
        fs::read(site.path(to).join("model.safetensors")).unwrap()
    };
    let run = export("kept", "of-run");
    assert!(run == export("kept/checkpoint-1", "of-best"));
    assert!(run != export("kept/checkpoint-4", "of-latest"));

    let line = format!("{often} {best} --early-stopping-patience 2 --max-steps 9 --output early");
    let screen = site.train(&line).screen;
    assert_says(&screen, &["training ends at step 3 of 9", "checkpoint-1"]);
    // A run that goes on has no best checkpoint until it chooses one again.
    let line = format!("{often} --max-steps 5 --output kept --resume auto");
    site.train(&line);
    assert!(!site.path("kept/best").exists());
    assert!(run != export("kept", "of-next"));

    let line = format!("{often} {best} --early-stopping-patience 2 --max-steps 9 --output early");
    // A resumed run knows the best evaluation of the run before.
    let resumed = site.train(&format!("{line} --resume auto")).screen;
    assert_says(&resumed, &["training ends at step 4 of 9", "checkpoint-1"]);

    let screen = site.refuse("--load-best-model-at-end --save-steps 1", 2, "E09");
    assert_says(&screen, &["--eval-data FILE"]);
    let screen = site.refuse(
        "--load-best-model-at-end --save-steps 3 --eval-steps 2 --eval-data data/samples.json",
        2,
        "E09",
    );
    assert_says(&screen, &["an evaluation at every checkpoint"]);
    // Evaluations without a checkpoint are not chosen, even where they are better.
    let line = format!("{often} {best} --save-steps 2 --max-steps 4 --output rarely");
    let screen = site.train(&line).screen;
    assert_says(&screen, &["checkpoint-2 · eval_loss"]);
    let state = read_json(&site.path("rarely/trainer_state.json"));
    assert_eq!(state["best_global_step"], 1);
    let named = state["best_model_checkpoint"].as_str().unwrap();
    assert!(named.ends_with("rarely/checkpoint-2"), "{named}");
    // A new directory does not have the best checkpoint of the old one.
    let line = format!("{often} {best} --max-steps 6 --resume rarely/checkpoint-4 --output moved");
    let screen = site.train(&line).screen;
    assert_says(&screen, &["checkpoint-5 · eval_loss"]);
}
