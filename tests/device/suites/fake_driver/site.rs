//! Directory of a test, and the program in it.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

use device_tests::fake_driver;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Makes this binary the program under test.
pub(crate) const PROGRAM: &str = "TESSERA_FAKE_PROGRAM";

/// Variables of a process.
pub(crate) type Variables<'a> = &'a [(&'a str, &'a str)];

/// Two updates of the demo, without what takes long on an emulator.
pub(crate) const DEMO: &str = "--zero 3 --max-steps 2 --lr-scheduler-type constant --logging-steps 1 --eval-strategy no \
                               --save-strategy no --per-device-train-batch-size 2 --verify-gpu off";
/// Training of the model in the directory.
const MODEL: &str = "--model model --data data.json --zero 3 --learning-rate 1e-3 --model-max-length 96 --max-slice-nums 1 \
                     --lr-scheduler-type constant";
/// Two updates in f32, and nothing else.
pub(crate) const TWO_UPDATES: &str =
    "--precision f32 --max-steps 2 --logging-steps 1 --eval-strategy no --save-strategy no";

/// The words of a line, without the verification of GPUs unless the line asks for it.
fn words(line: &str) -> String {
    let has_none = |command: &&str| line.starts_with(command);
    match line.contains("--verify-gpu") || ["doctor", "synth"].iter().any(has_none) {
        true => line.to_owned(),
        false => format!("{line} --verify-gpu off"),
    }
}

/// Directory of the driver, built once, inside the target directory.
pub(crate) fn driver() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let program = std::env::current_exe().unwrap();
        let directory = program.parent().unwrap().join("fake-driver");
        fake_driver::build(&directory).unwrap();
        directory
    })
}

/// Golden pack of a family.
fn pack(family: &str) -> PathBuf {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../golden");
    golden.join(family)
}

/// Whether `TESSERA_EVERY_PACK=1` asks for all combinations, as the nightly run does.
pub(crate) fn every() -> bool {
    std::env::var("TESSERA_EVERY_PACK").is_ok_and(|asked| asked == "1")
}

/// A port of this machine without a listener.
pub(crate) fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

/// Exit code of a process, and what it wrote.
pub(crate) type Ended = (Option<i32>, String);

fn ended(output: Output) -> Ended {
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    (output.status.code(), text)
}

/// Runs of one test.
pub(crate) struct Site(TempDir);

impl Site {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// With a model, samples, of which every other has an image, and held-out samples.
    pub(crate) fn with_model() -> Self {
        let site = Self::new();
        let golden = pack("minicpm-v-2_6");
        fs::create_dir(site.path("model")).unwrap();
        for name in [
            "config.json",
            "model.safetensors",
            "preprocessor_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ] {
            fs::copy(golden.join(name), site.path("model").join(name)).unwrap();
        }
        site.copy_image();
        let sample = |i: usize| {
            let mut sample = json!({"id": i.to_string(), "conversations": [
                {"role": "user", "content": format!("What is {i}?")},
                {"role": "assistant", "content": format!("It is {i}.")},
            ]});
            if i.is_multiple_of(2) {
                sample["image"] = "a.png".into();
            }
            sample
        };
        let samples: Vec<Value> = (0..4).map(sample).collect();
        fs::write(site.path("data.json"), json!(samples).to_string()).unwrap();
        fs::write(site.path("held_out.json"), json!(samples[..2]).to_string()).unwrap();
        site
    }

    /// With four samples of one image in `data.json`, for any family.
    pub(crate) fn with_samples() -> Self {
        let site = Self::new();
        site.copy_image();
        let sample = json!({"id": "0", "image": "a.png", "conversations": [
            {"role": "user", "content": "<image>\nWhat is it?"},
            {"role": "assistant", "content": "It is this."},
        ]});
        let samples = vec![sample; 4];
        fs::write(site.path("data.json"), json!(samples).to_string()).unwrap();
        site
    }

    /// Copies a small image to `a.png`.
    fn copy_image(&self) {
        let images = fs::read_dir(pack("minicpm-v-2_6/cases/square_no_slice")).unwrap();
        let mut images = images.map(|entry| entry.unwrap().path());
        let image = images.find(|path| path.extension().is_some_and(|end| end == "png"));
        fs::copy(image.unwrap(), self.path("a.png")).unwrap();
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn command(&self, variables: Variables<'_>, line: &str) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(words(line).split_whitespace())
            .current_dir(self.0.path())
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap())
            .env("TMPDIR", self.0.path())
            .env("XDG_CACHE_HOME", self.0.path())
            .env("TESSERA_CUDA_LIBS", driver())
            // The fake driver has the built-in PTX only.
            .env("TESSERA_CUDA_ARCH", "sm_80")
            .env("TESSERA_MATMUL", "own")
            .env(PROGRAM, "1")
            .envs(variables.iter().copied())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Runs the program with these words and variables.
    pub(crate) fn run(&self, variables: Variables<'_>, line: &str) -> Ended {
        ended(self.command(variables, line).output().unwrap())
    }

    /// Runs the program on the samples with the model of a golden pack, which must succeed and break no rule.
    pub(crate) fn train_pack(&self, family: &str, line: &str) {
        let model = pack(family).display().to_string();
        let line = format!("{DEMO} --nproc 1 --model {model} --data data.json {line}");
        let (code, text) = self.run(&[], &line);
        assert_eq!(code, Some(0), "{line}\n{text}");
        assert!(!text.contains("fake driver: "), "{text}");
    }

    /// Runs two processes at once, each with its own variables, on the directory's model.
    pub(crate) fn started(&self, variables: [Vec<(&str, &str)>; 2], line: &str) -> [Ended; 2] {
        let line = format!("{MODEL} {line}");
        let start = |own: Vec<(&str, &str)>| self.command(&own, &line).spawn().unwrap();
        let children = variables.map(start);
        children.map(|child| ended(child.wait_with_output().unwrap()))
    }

    /// Runs the program on the directory's model.
    pub(crate) fn try_train(&self, variables: Variables<'_>, line: &str) -> Ended {
        self.run(variables, &format!("{MODEL} {line}"))
    }

    /// As [`Site::try_train`], which must succeed and break no rule of the driver. Returns the screen.
    pub(crate) fn train(&self, variables: Variables<'_>, line: &str) -> String {
        let (code, text) = self.try_train(variables, line);
        assert_eq!(code, Some(0), "{line}\n{text}");
        assert!(!text.contains("fake driver: "), "{text}");
        text
    }

    pub(crate) fn rows(&self, run: &str) -> Vec<Value> {
        self.lines(&format!("{run}/trainer_log.jsonl"))
    }

    /// Values of a file with one in each line.
    pub(crate) fn lines(&self, name: &str) -> Vec<Value> {
        let text = fs::read_to_string(self.path(name)).unwrap();
        let rows = text.lines().map(|line| serde_json::from_str(line).unwrap());
        rows.collect()
    }

    /// A number of the log, from the rows that have it.
    pub(crate) fn logged(&self, run: &str, field: &str) -> Vec<f64> {
        let rows = self.rows(run);
        rows.iter().filter_map(|row| row[field].as_f64()).collect()
    }

    pub(crate) fn losses(&self, run: &str) -> Vec<f64> {
        self.logged(run, "loss")
    }

    pub(crate) fn weights(&self, run: &str, step: u64) -> Vec<u8> {
        let file = format!("{run}/checkpoint-{step}/model.safetensors");
        fs::read(self.path(&file)).unwrap()
    }

    pub(crate) fn json(&self, name: &str) -> Value {
        serde_json::from_slice(&fs::read(self.path(name)).unwrap()).unwrap()
    }

    /// Peak of device memory in the plan of a run, in bytes.
    pub(crate) fn planned_peak(&self, run: &str) -> u64 {
        let plan = self.json(&format!("{run}/plan.json"));
        plan["plan"]["memory"]["peak"]["device"].as_u64().unwrap()
    }

    /// The peak of device memory in use is the planned one.
    pub(crate) fn takes_what_the_plan_says(&self, run: &str) {
        let planned = self.json(&format!("{run}/plan.json"));
        let phases = planned["plan"]["memory"]["phases"].as_object().unwrap();
        let total = |kinds: &Value| -> u64 {
            let kinds = kinds["device"].as_object().unwrap();
            let used = kinds.iter().filter(|(kind, _)| *kind != "margin");
            used.filter_map(|(_, bytes)| bytes.as_u64()).sum()
        };
        let planned = phases.values().map(total).max().unwrap();
        let rows = self.rows(run);
        let measured = rows
            .iter()
            .filter_map(|row| row["bytes"]["device"].as_u64());
        assert_eq!(measured.max(), Some(planned), "{run}");
    }
}

/// Checks that a screen has all of these words.
pub(crate) fn says(screen: &str, all: &[&str]) {
    for words in all {
        assert!(screen.contains(words), "no {words:?} in\n{screen}");
    }
}
