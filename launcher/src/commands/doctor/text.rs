//! Rendering of the report as aligned plain text, for reading and pasting.

use super::Report;
use crate::device::survey::environment::{Kind, Variable};
use crate::device::survey::facts::{
    Cuda, Facts, Gpu, LibraryFacts, Limit, Role, Storage, version_text,
};
use crate::device::survey::findings::{Finding, Severity};
use crate::units::{bytes, grouped};

/// Width at which lists are broken.
const WIDTH: usize = 100;
/// Column at which the text after a label starts.
const INDENT: usize = 10;
/// Columns for the value of a variable.
const VALUE_WIDTH: usize = 12;
/// Variables of other trainers that are explained even if they are not set.
const ALWAYS_SHOWN: [&str; 3] = ["MP_SIZE", "NUM_GPUS_PER_WORKER", "PYTORCH_CUDA_ALLOC_CONF"];

/// The whole report. Every line ends with a line feed.
pub(super) fn render(report: &Report) -> String {
    let facts = &report.facts;
    let mut page = Page::default();
    machine(facts, &mut page);
    for (place, directory) in facts.storage.iter().enumerate() {
        page.line(if place == 0 { "storage" } else { "" }, &storage(directory));
    }
    driver(&facts.cuda, &mut page);
    for library in &facts.cuda.libraries {
        libraries(library, &mut page);
    }
    gpus(report, &mut page);
    environment(&facts.environment, &mut page);
    page.blank();
    page.line("verdict", &report.verdict.summary);
    page.line("", &counts(&report.findings));
    for (place, finding) in report.findings.iter().enumerate() {
        page.blank();
        let severity = match finding.severity {
            Severity::Problem => "problem",
            Severity::Warning => "warning",
            Severity::Note => "note",
        };
        let head = format!("{severity:<7} {}", finding.title);
        page.line(&format!("{}.", place + 1), &head);
        for (step, next) in finding.next.iter().enumerate() {
            let label = if step == 0 { "next" } else { "" };
            page.line("", &format!("{label:<7} {next}"));
        }
    }
    page.0
}

#[derive(Default)]
struct Page(String);

impl Page {
    fn line(&mut self, label: &str, text: &str) {
        let line = format!(" {label:<9}{text}");
        self.0.push_str(line.trim_end());
        self.0.push('\n');
    }

    fn blank(&mut self) {
        self.0.push('\n');
    }

    /// Breaks a list into lines. Each line but the last ends with a comma.
    fn list(&mut self, label: &str, indent: usize, items: &[String]) {
        let mut line = String::new();
        let mut label = label;
        let mut lines = Vec::new();
        for (place, item) in items.iter().enumerate() {
            let item = if place + 1 < items.len() {
                format!("{item},")
            } else {
                item.clone()
            };
            let wide = line.chars().count() + item.chars().count() + 1 + INDENT + indent > WIDTH;
            if wide && !line.is_empty() {
                lines.push(std::mem::take(&mut line));
            }
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(&item);
        }
        lines.push(line);
        for line in lines {
            self.line("", &format!("{label:<indent$}{line}"));
            label = "";
        }
    }
}

fn joined(parts: impl IntoIterator<Item = Option<String>>) -> String {
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    parts.join(" · ")
}

fn machine(facts: &Facts, page: &mut Page) {
    let (program, system, cpu) = (&facts.program, &facts.system, &facts.cpu);
    let build = if program.is_release {
        "release"
    } else {
        "debug"
    };
    let cuda = if program.has_cuda { "with" } else { "without" };
    page.line(
        "program",
        &format!("launcher {} · {build} build {cuda} CUDA", program.version),
    );
    page.line(
        "system",
        &joined([
            system.name.clone(),
            system
                .kernel
                .as_ref()
                .map(|kernel| format!("Linux {kernel}")),
            Some(system.architecture.to_string()),
            system.libc.clone(),
            system
                .container
                .map(|kind| format!("in a container ({kind})")),
        ]),
    );
    page.line(
        "cpu",
        &joined([
            cpu.model.clone(),
            Some(format!(
                "{} of {} cores usable",
                cpu.usable_cores, cpu.cores
            )),
            Some(cpu.instruction_sets.join(" ")).filter(|sets| !sets.is_empty()),
        ]),
    );
    let memory = &facts.memory;
    let cgroup = memory.cgroup.as_ref().map(|group| {
        let limit = group.limit_bytes.map_or("none".to_string(), bytes);
        format!(
            "cgroup v{} limit {limit}, used {}",
            group.version,
            bytes(group.used_bytes)
        )
    });
    page.line(
        "memory",
        &joined([
            Some(bytes(memory.total_bytes)),
            Some(format!("available {}", bytes(memory.available_bytes))),
            Some(match memory.swap_bytes {
                0 => "no swap".to_string(),
                swap => format!("swap {}", bytes(swap)),
            }),
            Some(cgroup.unwrap_or_else(|| "no cgroup".to_string())),
        ]),
    );
    let limits = &facts.limits;
    page.line(
        "limits",
        &format!(
            "locked memory {} · open files {} · processes {}",
            limit(limits.locked_memory_bytes, bytes),
            limit(limits.open_files, grouped),
            limit(limits.processes, grouped)
        ),
    );
}

fn limit(limit: Limit, text: fn(u64) -> String) -> String {
    let text = |value: Option<u64>| value.map_or("unlimited".to_string(), text);
    if limit.soft == limit.hard {
        text(limit.soft)
    } else {
        format!("{} (at most {})", text(limit.soft), text(limit.hard))
    }
}

fn storage(directory: &Storage) -> String {
    // The current directory often contains a person's name, so reports leave it out.
    let (path, what) = match directory.role {
        Role::Runs => (".".to_string(), "runs, unless --output is given"),
        Role::Temporary => (
            directory.path.display().to_string(),
            "private files of jobs",
        ),
        Role::SharedMemory => (
            directory.path.display().to_string(),
            "exchange between ranks",
        ),
    };
    let kind = directory.file_system.as_deref().unwrap_or("unknown");
    let room = match (directory.free_bytes, directory.total_bytes) {
        (Some(free), Some(total)) => format!("{} of {} free", bytes(free), bytes(total)),
        _ => "missing".to_string(),
    };
    let mut line = format!("{path:<10} {kind:<8} {room:<22} {what}");
    if !directory.is_writable {
        line += " · not writable";
    }
    line
}

fn driver(cuda: &Cuda, page: &mut Page) {
    let version = cuda.cuda_version.map(version_text);
    let minimum = cuda.minimum_cuda_version.map(version_text);
    page.line(
        "driver",
        &joined([
            Some(match cuda.pci_devices {
                0 => "no NVIDIA GPU on the PCI bus".to_string(),
                1 => "1 NVIDIA GPU on the PCI bus".to_string(),
                count => format!("{count} NVIDIA GPUs on the PCI bus"),
            }),
            Some(match &cuda.kernel_module {
                Some(version) => format!("kernel module {version}"),
                None => "no kernel module".to_string(),
            }),
            cuda.driver
                .as_ref()
                .map(|version| format!("libraries {version}")),
            version.map(|version| format!("CUDA {version}")),
            minimum.map(|minimum| format!("CUDA {minimum} needed")),
        ]),
    );
    if let Some(problem) = &cuda.problem {
        page.line("", problem);
    }
}

fn libraries(library: &LibraryFacts, page: &mut Page) {
    let Some(path) = &library.path else {
        page.line("library", &format!("{} not found; tried", library.name));
        // Attempts with the same outcome are grouped.
        let mut outcomes: Vec<(&str, Vec<String>)> = Vec::new();
        for attempt in &library.attempts {
            let known = outcomes
                .iter_mut()
                .find(|(text, _)| *text == attempt.outcome);
            match known {
                Some((_, memory_plans)) => memory_plans.push(attempt.place.clone()),
                None => outcomes.push((&attempt.outcome, vec![attempt.place.clone()])),
            }
        }
        for (outcome, memory_plans) in outcomes {
            page.list("", 2, &memory_plans);
            page.line("", &format!("    {}", outcome.replace('\n', " ")));
        }
        return;
    };
    let version = library
        .version
        .as_ref()
        .map(|version| format!(" {version}"));
    page.line(
        "library",
        &format!(
            "{}{} {}",
            library.name,
            version.unwrap_or_default(),
            path.display()
        ),
    );
}

fn gpus(report: &Report, page: &mut Page) {
    let gpus = &report.facts.gpus;
    if gpus.is_empty() {
        page.line("gpus", "none");
    }
    for gpu in gpus {
        let label = match (gpu.ordinal, gpu.index) {
            (Some(ordinal), _) => format!("gpu {ordinal}"),
            (None, Some(index)) => format!("(gpu {index})"),
            (None, None) => "(gpu)".to_string(),
        };
        for (place, line) in gpu_lines(gpu).iter().enumerate() {
            page.line(if place == 0 { &label } else { "" }, line);
        }
    }
    match report.gpus_are_equal {
        Some(true) => page.line("", "all equal"),
        Some(false) => page.line("", "not equal"),
        None => {}
    }
}

fn gpu_lines(gpu: &Gpu) -> Vec<String> {
    let free = match (gpu.free_bytes, gpu.memory_bytes) {
        (Some(free), Some(all)) => Some(format!("{} of {} free", bytes(free), bytes(all))),
        (None, Some(all)) => Some(bytes(all)),
        _ => None,
    };
    let identity = joined([
        Some(
            gpu.name
                .clone()
                .unwrap_or_else(|| "does not respond".to_string()),
        ),
        gpu.compute_capability
            .map(|capability| format!("compute capability {}", version_text(capability))),
        gpu.multiprocessors
            .map(|count| format!("{count} multiprocessors")),
        free,
    ]);
    let others = gpu.processes.as_ref().map(|processes| {
        if processes.is_empty() {
            return "no other process".to_string();
        }
        let list: Vec<String> = processes
            .iter()
            .map(|process| {
                let held = process.used_bytes.map_or("?".to_string(), bytes);
                format!("process {} uses {held}", process.pid)
            })
            .collect();
        list.join(", ")
    });
    let link = gpu
        .pcie
        .generation
        .zip(gpu.pcie.width)
        .map(|(generation, width)| {
            let most = gpu.pcie.max_generation.zip(gpu.pcie.max_width);
            let most = most.map(|(generation, width)| format!(" (at most {generation} x{width})"));
            format!("PCIe {generation} x{width}{}", most.unwrap_or_default())
        });
    let peers = gpu.peers.as_ref().map(|peers| {
        if peers.is_empty() {
            return "no peer access".to_string();
        }
        let list: Vec<String> = peers.iter().map(ToString::to_string).collect();
        format!("peer access to {}", list.join(", "))
    });
    let nvlinks = gpu.nvlinks.filter(|links| *links > 0);
    let connections = joined([
        gpu.pci_bus_id.clone(),
        link,
        nvlinks.map(|links| format!("{links} NVLinks")),
        peers,
    ]);
    let use_now = joined([
        others,
        gpu.utilization_percent
            .map(|share| format!("{share} % busy")),
        gpu.uncorrected_ecc_errors
            .map(|errors| format!("{errors} uncorrected memory errors")),
        (gpu.ordinal.is_none()).then(|| "hidden from CUDA".to_string()),
    ]);
    [identity, connections, use_now]
        .into_iter()
        .filter(|line| !line.is_empty())
        .collect()
}

fn environment(table: &[Variable], page: &mut Page) {
    let is_shown = |row: &&Variable| {
        row.kind != Kind::WithoutEffect || row.is_set || ALWAYS_SHOWN.contains(&row.name.as_str())
    };
    let names = table.iter().filter(is_shown).map(|row| row.name.len());
    let width = names.max().unwrap_or(0);
    for (kind, title) in [
        (Kind::Read, "variables that this program reads"),
        (
            Kind::ActsOnOthers,
            "variables that affect libraries and tools",
        ),
        (
            Kind::WithoutEffect,
            "variables of other trainers: no effect here",
        ),
    ] {
        page.blank();
        page.line("env", title);
        for row in table.iter().filter(is_shown).filter(|row| row.kind == kind) {
            variable(row, width, page);
        }
    }
    let others = table.iter().filter(|row| !is_shown(row)).count();
    page.line(
        "",
        &format!("{others} more known variables are not set; --json lists them"),
    );
}

fn variable(row: &Variable, width: usize, page: &mut Page) {
    let value = match (&row.value, row.is_set) {
        (Some(value), _) if value.is_empty() => "(empty)",
        (Some(value), _) => value.as_str(),
        (None, true) => "not shown",
        (None, false) => "–",
    };
    let blank = format!("{:<width$}  {:<VALUE_WIDTH$}", "", "");
    let head = format!("{:<width$}  {value:<VALUE_WIDTH$}", row.name);
    // A long value gets its own line.
    if value.chars().count() > VALUE_WIDTH {
        page.line("", &head);
        page.line("", &format!("{blank}  {}", row.effect));
    } else {
        page.line("", &format!("{head}  {}", row.effect));
    }
    if let Some(instead) = row.instead {
        page.line("", &format!("{blank}  instead: {instead}"));
    }
}

fn counts(findings: &[Finding]) -> String {
    let count = |severity: Severity, noun: &str| {
        let found = findings
            .iter()
            .filter(|finding| finding.severity == severity);
        match found.count() {
            0 => None,
            1 => Some(format!("1 {noun}")),
            many => Some(format!("{many} {noun}s")),
        }
    };
    let parts = [
        count(Severity::Problem, "problem"),
        count(Severity::Warning, "warning"),
        count(Severity::Note, "note"),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    if parts.is_empty() {
        "no problems found".to_string()
    } else {
        parts.join(", ")
    }
}
