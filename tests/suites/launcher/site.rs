//! A test directory with a model, samples, a home, temporary files, and the launcher running in it.

use engine::checkpoint::{ShardedTensorWriter, TensorSpec};
use kernels::DType;
use models::WeightSource;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Longest wait for a line, and for the end of a run.
const LIMIT: Duration = Duration::from_secs(60);
/// The same on the fake driver, which emulates kernels.
const EMULATED_LIMIT: Duration = Duration::from_secs(600);
/// Default flags of a run.
const DEFAULTS: [(&str, &str); 7] = [
    ("--model", "model"),
    ("--data", "data/samples.json"),
    ("--output", "out"),
    ("--precision", "f32"),
    ("--learning-rate", "1e-3"),
    ("--max-steps", "2"),
    ("--device", "cpu"),
];
const DIRECTORIES: [&str; 4] = ["home", "tmp", "model", "data"];

pub(crate) fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("golden")
        .join(name)
}

/// Files that are no packs of models.
pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures")
        .join(name)
}

pub(crate) struct Site {
    root: TempDir,
    /// Variables of every process besides the usual ones.
    variables: Vec<(&'static str, PathBuf)>,
}

impl Site {
    /// A site with the model directory of the golden pack and six samples: two with one image, one with two images,
    /// three without any.
    pub(crate) fn new() -> Self {
        Self::with_model("minicpm-v-2_6")
    }

    pub(crate) fn with_model(pack: &str) -> Self {
        let site = Self {
            root: tempfile::tempdir().unwrap(),
            variables: Vec::new(),
        };
        for directory in DIRECTORIES {
            fs::create_dir(site.path(directory)).unwrap();
        }
        let pack = golden(pack);
        for name in [
            "config.json",
            "model.safetensors",
            "preprocessor_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ] {
            fs::copy(pack.join(name), site.path("model").join(name)).unwrap();
        }
        let cases = golden("minicpm-v-2_6").join("cases");
        let mut samples = Vec::new();
        for case in ["wide_two_turns", "multi_image", "square_no_slice"] {
            let case = cases.join(case);
            let text = fs::read(case.join("conversation.json")).unwrap();
            let Value::Array(own) = serde_json::from_slice(&text).unwrap() else {
                panic!("a list of samples");
            };
            samples.extend(own);
            for entry in fs::read_dir(case).unwrap() {
                let path = entry.unwrap().path();
                if path.extension().is_some_and(|e| e == "png") {
                    let target = site.path("data").join(path.file_name().unwrap());
                    fs::copy(path, target).unwrap();
                }
            }
        }
        samples.extend((0..3).map(text_only));
        site.write_samples("samples", &samples);
        site
    }

    /// A site with the model directory of any golden pack and six samples, every second one with an image. It has only
    /// those tokenizer files that published directories have.
    pub(crate) fn with_family(pack: &str) -> Self {
        let site = Self {
            root: tempfile::tempdir().unwrap(),
            variables: Vec::new(),
        };
        for directory in DIRECTORIES {
            fs::create_dir(site.path(directory)).unwrap();
        }
        let pack = golden(pack);
        let has_model_file = pack.join("tokenizer.model").is_file();
        for name in [
            "config.json",
            "model.safetensors",
            "preprocessor_config.json",
            "tokenizer.model",
            "tokenizer.json",
            "tokenizer_config.json",
            "generation_config.json",
            "chat_template.jinja",
        ] {
            let source = pack.join(name);
            if source.is_file() && !(has_model_file && name == "tokenizer.json") {
                fs::copy(source, site.path("model").join(name)).unwrap();
            }
        }
        let image = golden("minicpm-v-2_6").join("cases/wide_two_turns/image_wide.png");
        fs::copy(image, site.path("data/image_wide.png")).unwrap();
        let sample = |i: usize| {
            let mut sample = text_only(i);
            if i.is_multiple_of(2) {
                sample["image"] = "image_wide.png".into();
            }
            sample
        };
        let samples: Vec<Value> = (0..6).map(sample).collect();
        site.write_samples("samples", &samples);
        site
    }

    /// Gives every process the GPUs of the fake driver, which has the built-in PTX only. Driver and objects are built once,
    /// beside the program of this test.
    pub(crate) fn take_fake_driver(&mut self) {
        static BUILT: OnceLock<PathBuf> = OnceLock::new();
        let driver = BUILT.get_or_init(|| {
            let program = std::env::current_exe().unwrap();
            let directory = program.with_file_name("fake-driver");
            device_tests::fake_driver::build(&directory).unwrap();
            directory
        });
        self.variables = vec![
            ("TESSERA_CUDA_LIBS", driver.clone()),
            ("TESSERA_CUDA_ARCH", "sm_80".into()),
            ("TESSERA_MATMUL", "own".into()),
        ];
    }

    /// Variables of every process besides the usual ones.
    pub(crate) fn variables(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        let variables = self.variables.iter();
        variables.map(|(name, value)| (*name, &**value))
    }

    pub(crate) fn path(&self, relative: &str) -> PathBuf {
        self.root.path().join(relative)
    }

    pub(crate) fn samples(&self) -> Vec<Value> {
        read_json(&self.path("data/samples.json"))
            .as_array()
            .unwrap()
            .clone()
    }

    /// Writes `data/NAME.json`.
    pub(crate) fn write_samples(&self, name: &str, samples: &[Value]) {
        let path = self.path(&format!("data/{name}.json"));
        fs::write(path, serde_json::to_vec_pretty(samples).unwrap()).unwrap();
    }

    /// Starts the launcher with exactly these arguments, separated by spaces.
    pub(crate) fn start_plain(&self, line: &str) -> Running {
        // Tests may run where SIGINT is ignored, as in the background of a script. The program would keep that.
        let mut command = Command::new("env");
        command
            .arg("--default-signal")
            .arg(env!("CARGO_BIN_EXE_tessera_test_launcher"))
            .args(line.split_whitespace());
        self.start_command(command)
    }

    pub(crate) fn start_command(&self, mut command: Command) -> Running {
        let mut child = command
            .current_dir(self.root.path())
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", self.path("home"))
            .env("XDG_CACHE_HOME", self.path("home/cache"))
            .env("TMPDIR", self.path("tmp"))
            .envs(self.variables())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stream = child.stderr.take().unwrap();
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stream).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Running {
            child,
            lines,
            screen: String::new(),
            limit: match self.variables.is_empty() {
                true => LIMIT,
                false => EMULATED_LIMIT,
            },
        }
    }

    /// Starts the launcher with these arguments and the defaults of the missing ones.
    pub(crate) fn start(&self, line: &str) -> Running {
        self.start_plain(&completed(line))
    }

    /// Runs to the end and checks that no temporary file is left.
    pub(crate) fn run(&self, line: &str) -> Outcome {
        let outcome = self.start(line).finish();
        self.assert_tidy();
        outcome
    }

    /// As [`Site::run`], but the run must succeed.
    pub(crate) fn train(&self, line: &str) -> Outcome {
        let outcome = self.run(line);
        assert_eq!(outcome.code, Some(0), "{line}\n{}", outcome.screen);
        outcome
    }

    /// Expects a refusal with this exit status and code, and a complete error block. Returns the screen.
    pub(crate) fn refuse(&self, line: &str, status: i32, code: &str) -> String {
        let before = self.everything();
        let outcome = self.run(line);
        let ended = (outcome.code, outcome.signal);
        let screen = outcome.screen;
        assert_eq!(ended, (Some(status), None), "{line}\n{screen}");
        for part in [&format!("error[{code}] "), "  cause     ", "  next      "] {
            assert!(screen.contains(part), "{line}: no {part:?} in\n{screen}");
        }
        assert_eq!(
            screen.matches("error[").count(),
            1,
            "one report, {line}\n{screen}"
        );
        let after = self.everything();
        let changed: Vec<_> = after
            .iter()
            .filter(|(path, bytes)| before.get(*path) != Some(bytes))
            .map(|(path, _)| path)
            .chain(before.keys().filter(|path| !after.contains_key(*path)))
            .collect();
        assert!(changed.is_empty(), "{line} touched {changed:?}\n{screen}");
        screen
    }

    /// Every file of the site with its bytes, and every directory, except those of the user's cache.
    fn everything(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut found = BTreeMap::new();
        let mut directories = vec![self.root.path().to_path_buf()];
        while let Some(directory) = directories.pop() {
            for entry in fs::read_dir(&directory).unwrap() {
                let path = entry.unwrap().path();
                if path == self.path("home/cache") {
                    continue;
                }
                if path.is_dir() && !path.is_symlink() {
                    found.insert(path.clone(), Vec::new());
                    directories.push(path);
                } else {
                    found.insert(path.clone(), fs::read(&path).unwrap_or_default());
                }
            }
        }
        found
    }

    pub(crate) fn assert_tidy(&self) {
        assert_eq!(listing(&self.path("tmp")), Vec::<String>::new());
    }

    /// The token in the names of the running job's files.
    pub(crate) fn token(&self) -> String {
        let names = listing(&self.path("tmp"));
        let job = names.iter().find_map(|name| name.strip_prefix("tessera-"));
        job.expect("a job is running").to_owned()
    }
}

/// Adds the defaults of flags that `line` does not set.
pub(crate) fn completed(line: &str) -> String {
    let mut line = line.to_owned();
    for (flag, value) in DEFAULTS {
        if !line.split_whitespace().any(|word| word == flag) {
            line += &format!(" {flag} {value}");
        }
    }
    line
}

pub(crate) fn text_only(number: usize) -> Value {
    json!({
        "id": format!("text-{number}"),
        "conversations": [
            {"role": "user", "content": format!("What is {number} and {number}?")},
            {"role": "assistant", "content": format!("It is {}.", 2 * number)},
        ],
    })
}

/// A started launcher whose screen is read meanwhile.
pub(crate) struct Running {
    child: Child,
    lines: Receiver<String>,
    screen: String,
    limit: Duration,
}

impl Running {
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Reads up to a line that `wanted` accepts.
    pub(crate) fn wait_for(&mut self, what: &str, wanted: impl Fn(&str) -> bool) {
        loop {
            match self.lines.recv_timeout(self.limit) {
                Ok(line) => {
                    self.keep(&line);
                    if wanted(&line) {
                        return;
                    }
                }
                Err(error) => self.give_up(&format!("no line with {what}: {error}")),
            }
        }
    }

    /// Reads up to the row of an optimizer step.
    pub(crate) fn wait_for_step(&mut self) {
        self.wait_for("a step", |line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            words.len() > 4 && words[0].parse::<u64>().is_ok() && words[1].parse::<f64>().is_ok()
        });
    }

    /// Sends a signal by its name.
    pub(crate) fn signal(&self, name: &str) {
        signal(self.pid(), name);
    }

    pub(crate) fn finish(mut self) -> Outcome {
        let until = Instant::now() + self.limit;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => self.keep(&line),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => self.give_up("the run does not end"),
            }
        }
        let status = self.child.wait().unwrap();
        Outcome {
            code: status.code(),
            signal: status.signal(),
            screen: std::mem::take(&mut self.screen),
        }
    }

    fn keep(&mut self, line: &str) {
        self.screen += line;
        self.screen.push('\n');
    }

    fn give_up(&self, why: &str) -> ! {
        panic!("{why}\n{}", self.screen);
    }
}

impl Drop for Running {
    /// Ends the run of a test that fails.
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

pub(crate) struct Outcome {
    pub(crate) code: Option<i32>,
    pub(crate) signal: Option<i32>,
    pub(crate) screen: String,
}

pub(crate) fn signal(pid: u32, name: &str) {
    let status = Command::new("kill")
        .args(["-s", name, &pid.to_string()])
        .status();
    assert!(status.unwrap().success());
}

/// Waits for the end of a process that is not a child of this one.
pub(crate) fn wait_for_end(pid: u32, limit: Duration) {
    let started = Instant::now();
    let status = Command::new("timeout")
        .arg(limit.as_secs().to_string())
        .args([
            "tail",
            "--pid",
            &pid.to_string(),
            "-s",
            "0.05",
            "-f",
            "/dev/null",
        ])
        .status();
    assert!(
        status.unwrap().success(),
        "process {pid} is alive after {:?}",
        started.elapsed()
    );
}

/// Sorted names in a directory; none if it does not exist.
pub(crate) fn listing(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

pub(crate) fn read_json(path: &Path) -> Value {
    let bytes = fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_slice(&bytes).unwrap()
}

/// Rows of a run's trainer_log.jsonl.
pub(crate) fn log_rows(output: &Path) -> Vec<Value> {
    let text = fs::read_to_string(output.join("trainer_log.jsonl")).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// Training losses by step.
pub(crate) fn losses(output: &Path) -> Vec<f64> {
    log_rows(output)
        .iter()
        .filter_map(|row| row["loss"].as_f64())
        .collect()
}

/// Names, dtypes and shapes in a safetensors file.
pub(crate) fn tensors(path: &Path) -> BTreeMap<String, (Option<DType>, Vec<usize>)> {
    let source = WeightSource::open_file(path).unwrap();
    source
        .names()
        .map(|name| {
            let shape = source.shape(name).unwrap().to_vec();
            (name.to_owned(), (source.dtype(name), shape))
        })
        .collect()
}

/// Processes of a job as (process id, rank), found by their environment.
pub(crate) fn ranks(token: &str) -> Vec<(u32, usize)> {
    let mut found = Vec::new();
    for name in listing(Path::new("/proc")) {
        let Ok(pid) = name.parse::<u32>() else {
            continue;
        };
        let Ok(environment) = fs::read(format!("/proc/{pid}/environ")) else {
            continue;
        };
        let value = |name: &str| {
            let mut entries = environment.split(|byte| *byte == 0);
            entries.find_map(|entry| {
                let entry = std::str::from_utf8(entry).ok()?;
                entry.strip_prefix(name)?.strip_prefix('=')
            })
        };
        if value("TESSERA_RUN_TOKEN") == Some(token) {
            found.push((pid, value("RANK").unwrap().parse().unwrap()));
        }
    }
    found.sort_by_key(|(_, rank)| *rank);
    found
}

/// Checks that no process, shared memory or temporary file of the job is left.
pub(crate) fn assert_nothing_left(site: &Site, token: &str) {
    site.assert_tidy();
    assert_eq!(ranks(token), []);
    let shared = listing(Path::new("/dev/shm"));
    assert!(
        !shared.iter().any(|name| name.contains(token)),
        "{shared:?}"
    );
}

pub(crate) fn assert_says(screen: &str, words: &[&str]) {
    for word in words {
        assert!(screen.contains(word), "no {word:?} in\n{screen}");
    }
}

/// Writes the tensors `names` of `source` into `directory`: files of at most `limit` bytes, with an index if several.
pub(crate) fn write_weights(source: &WeightSource, names: &[&str], directory: &Path, limit: u64) {
    let spec = |name: &&str| TensorSpec {
        name: (*name).to_owned(),
        dtype: source.dtype(name).unwrap(),
        shape: source.shape(name).unwrap().to_vec(),
    };
    let specs: Vec<TensorSpec> = names.iter().map(spec).collect();
    let mut file = ShardedTensorWriter::create(directory, "model", &specs, &[], limit).unwrap();
    for spec in &specs {
        let bytes = source.read(&spec.name, spec.dtype).unwrap();
        file.write(&spec.name, &bytes).unwrap();
    }
    file.finish().unwrap();
}
