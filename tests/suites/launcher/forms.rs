//! Data that is read once, mixes of files, and images inside of a Parquet file: real runs.

use crate::generate;
use crate::site::{Site, listing, losses, read_json};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Starts the launcher with the words of `line` while `cat` sends it the samples.
fn piped(site: &Site, line: &str) -> String {
    let program = env!("CARGO_BIN_EXE_tessera_test_launcher");
    let mut command = Command::new("bash");
    command.args(["-c", &format!("cat data/samples.json | {program} {line}")]);
    let outcome = site.start_command(command).finish();
    assert_eq!(outcome.code, Some(0), "{line}\n{}", outcome.screen);
    outcome.screen
}

#[test]
fn standard_input_is_read_once_and_resumed_from_its_copy() {
    let site = Site::new();
    let rest = "--model model --precision f32 --learning-rate 1e-3 --image-dir data --lr-scheduler-type constant";
    site.train(&format!("{rest} --max-steps 4 --output whole"));
    piped(
        &site,
        &format!("{rest} --data - --max-steps 2 --output parts"),
    );
    assert_eq!(listing(&site.path("home/cache/tessera/streams")).len(), 1);
    let continued = site.start_plain("--resume parts --max-steps 4").finish();
    assert_eq!(continued.code, Some(0), "{}", continued.screen);
    assert_eq!(losses(&site.path("whole")), losses(&site.path("parts")));
    let weights = |run: &str| fs::read(site.path(&format!("{run}/checkpoint-4/model.safetensors")));
    assert!(weights("whole").unwrap() == weights("parts").unwrap());
}

/// A named pipe and CSV on standard input are read like files. Copies that nobody used for a month go.
#[test]
fn pipes_of_any_form_are_read_and_old_copies_are_removed() {
    let site = Site::new();
    let rest = "--model model --precision f32 --image-dir data --max-steps 1";
    let streams = site.path("home/cache/tessera/streams");
    fs::create_dir_all(&streams).unwrap();
    for (name, touched) in [("old.json", "2020-01-01"), ("new.json", "now")] {
        let file = streams.join(name);
        fs::write(&file, "[]").unwrap();
        let touch = Command::new("touch")
            .args(["-d", touched])
            .arg(&file)
            .status();
        assert!(touch.unwrap().success());
    }
    let mut line = "mkfifo pipe; cat data/samples.json > pipe & ".to_owned();
    line += &format!(
        "{} {rest} --data pipe --output fifo",
        env!("CARGO_BIN_EXE_tessera_test_launcher")
    );
    let mut command = Command::new("bash");
    command.args(["-c", &line]);
    let outcome = site.start_command(command).finish();
    assert_eq!(outcome.code, Some(0), "{}", outcome.screen);
    site.train(&format!("{rest} --output file"));
    assert_eq!(losses(&site.path("fifo")), losses(&site.path("file")));
    let left = listing(&streams);
    assert!(left.contains(&"new.json".to_owned()), "{left:?}");
    assert!(!left.contains(&"old.json".to_owned()), "{left:?}");
    // Rows of CSV from standard input, and from a file.
    fs::write(
        site.path("data/samples.json"),
        "query,response\nq,a\n\"x, y\",b\n",
    )
    .unwrap();
    fs::copy(site.path("data/samples.json"), site.path("data/table.csv")).unwrap();
    piped(&site, &format!("{rest} --data - --output stream"));
    site.train(&format!("{rest} --data data/table.csv --output table"));
    assert_eq!(losses(&site.path("stream")), losses(&site.path("table")));
}

#[test]
fn a_mix_goes_on_at_its_place_and_refuses_other_weights() {
    let site = Site::new();
    let all = site.samples();
    site.write_samples("some", &all[..2]);
    site.write_samples("more", &all[2..]);
    let mix = "--data data/some.json:2,data/more.json:0.5 --lr-scheduler-type constant";
    let whole = site.train(&format!(
        "{mix} --max-steps 6 --save-steps 3 --output whole"
    ));
    assert!(
        whole.screen.contains("an epoch takes 4 + 2 = 6 samples"),
        "{}",
        whole.screen
    );
    // Two epochs of six samples, two samples an update.
    assert_eq!(losses(&site.path("whole")).len(), 6);
    let line = "--max-steps 6 --output again --resume whole/checkpoint-3";
    site.train(&format!("{mix} {line}"));
    assert_eq!(
        losses(&site.path("whole"))[3..],
        losses(&site.path("again"))[..]
    );
    let other = "--data data/some.json:0.5,data/more.json:1.25 --lr-scheduler-type constant";
    let line = "--max-steps 6 --output other --resume whole/checkpoint-3";
    site.refuse(&format!("{other} {line}"), 9, "E08");
    site.refuse("--eval-data data/some.json:2", 2, "E09");
}

#[test]
fn a_number_of_samples_of_a_file_is_taken() {
    let site = Site::new();
    let all = site.samples();
    site.write_samples("some", &all[..2]);
    site.write_samples("more", &all[2..]);
    let run = site.start_plain(
        "--train_type full --defaults ours --model model --dataset data/some.json#1 data/more.json#6 --val_dataset data/samples.json#4 \
         --output out --torch_dtype float32 --max_steps 2 --learning_rate 1e-3 --device cpu --nproc 1",
    );
    let end = run.finish();
    assert!(
        end.screen.contains("an epoch takes 1 + 6 = 7 samples"),
        "{}",
        end.screen
    );
    let left = read_json(&site.path("out/eval_results.json"));
    assert_eq!(left["eval_samples"], 4, "{left}");
    let said = generate::run(
        &site,
        "eval --model out --data data/samples.json#3 --max-new-tokens 2 --device cpu",
    );
    assert_eq!(said.json()["eval_samples"], 3);
}

#[test]
fn images_inside_of_a_parquet_file_are_trained_on() {
    let site = Site::new();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/forms/cauldron.parquet");
    fs::copy(file, site.path("data/cauldron.parquet")).unwrap();
    let outcome = site.train("--data data/cauldron.parquet");
    assert!(
        outcome
            .screen
            .contains("cauldron.parquet: rounds, by its content"),
        "{}",
        outcome.screen
    );
    assert!(outcome.screen.contains("5 images ok"), "{}", outcome.screen);
}
