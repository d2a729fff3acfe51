//! Rendering of the report as aligned plain text, for reading and pasting.

use super::Report;
use crate::device::survey::environment::{Kind, Variable};
use crate::device::survey::facts::{
    Cuda, Facts, Gpu, LibraryFacts, Limit, Role, Storage, version_text,
};
use crate::device::survey::findings::{Finding, Severity};
use crate::lang::{Both, Text, both, columns, text};
use crate::units::{bytes, count, grouped};
use std::fmt::Display;

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
        page.line(first(place, STORAGE), storage(directory));
    }
    driver(&facts.cuda, &mut page);
    for library in &facts.cuda.libraries {
        libraries(library, &mut page);
    }
    gpus(report, &mut page);
    environment(&facts.environment, &mut page);
    page.blank();
    page.line(both("verdict", "结论"), &report.verdict.summary);
    if let Some(params) = report.verdict.frozen_params {
        let (wide, narrow) = (count(params.in_16_bits), count(params.in_4_bits));
        page.line(
            "",
            text!(
                "a GPU stores at most {wide} frozen parameters in 16 bits, {narrow} with --quantize nf4 --quantize-double",
                "一块 GPU 最多存放 {wide} 个 16 位的冻结参数，使用 --quantize nf4 --quantize-double 时为 {narrow} 个"
            ),
        );
    }
    page.line("", counts(&report.findings));
    for (place, finding) in report.findings.iter().enumerate() {
        page.blank();
        let severity = match finding.severity {
            Severity::Problem => both("problem", "问题"),
            Severity::Warning => both("warning", "警告"),
            Severity::Note => both("note", "提示"),
        };
        let head = format!("{severity:<7} {}", finding.title);
        page.line(format!("{}.", place + 1), head);
        for (step, next) in finding.next.iter().enumerate() {
            let label = first(step, both("next", "下一步"));
            page.line("", format!("{label:<7} {next}"));
        }
    }
    page.0
}

const STORAGE: Both = both("storage", "存储");

/// `label` on the first of several lines.
fn first(place: usize, label: Both) -> Both {
    if place == 0 { label } else { both("", "") }
}

#[derive(Default)]
struct Page(String);

impl Page {
    fn line(&mut self, label: impl Display, text: impl Display) {
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
            let wide = columns(&line) + columns(&item) + 1 + INDENT + indent > WIDTH;
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
            self.line("", format!("{label:<indent$}{line}"));
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
    let version = program.version;
    let build = match program.has_cuda {
        true => text!(
            "launcher {version} · {build} build with CUDA",
            "launcher {version} · {build} 构建，支持 CUDA"
        ),
        false => text!(
            "launcher {version} · {build} build without CUDA",
            "launcher {version} · {build} 构建，不支持 CUDA"
        ),
    };
    page.line(both("program", "程序"), build);
    page.line(
        both("system", "系统"),
        joined([
            system.name.clone(),
            system
                .kernel
                .as_ref()
                .map(|kernel| format!("Linux {kernel}")),
            Some(system.architecture.to_string()),
            system.libc.clone(),
            system
                .container
                .map(|kind| text!("in a container ({kind})", "在容器中（{kind}）").to_string()),
        ]),
    );
    page.line(
        "cpu",
        joined([
            cpu.model.clone(),
            Some(
                text!(
                    "{} of {} cores usable",
                    "{1} 个核心中的 {0} 个可用",
                    cpu.usable_cores,
                    cpu.cores
                )
                .to_string(),
            ),
            Some(cpu.instruction_sets.join(" ")).filter(|sets| !sets.is_empty()),
        ]),
    );
    let memory = &facts.memory;
    let cgroup = memory.cgroup.as_ref().map(|group| {
        let limit = group.limit_bytes.map_or_else(
            || both("none", "无").into(),
            |limit| Text::literal(bytes(limit)),
        );
        text!(
            "cgroup v{} limit {limit}, used {}",
            "cgroup v{} 上限 {limit}，已用 {}",
            group.version,
            bytes(group.used_bytes)
        )
        .to_string()
    });
    page.line(
        both("memory", "内存"),
        joined([
            Some(bytes(memory.total_bytes)),
            Some(text!("available {}", "可用 {}", bytes(memory.available_bytes)).to_string()),
            Some(match memory.swap_bytes {
                0 => both("no swap", "无交换空间").to_string(),
                swap => text!("swap {}", "交换空间 {}", bytes(swap)).to_string(),
            }),
            Some(cgroup.unwrap_or_else(|| both("no cgroup", "无 cgroup").to_string())),
        ]),
    );
    let limits = &facts.limits;
    page.line(
        both("limits", "限制"),
        text!(
            "locked memory {} · open files {} · processes {}",
            "锁定内存 {} · 打开文件 {} · 进程 {}",
            limit(limits.locked_memory_bytes, bytes),
            limit(limits.open_files, grouped),
            limit(limits.processes, grouped)
        ),
    );
}

fn limit(limit: Limit, text: fn(u64) -> String) -> String {
    let text =
        |value: Option<u64>| value.map_or_else(|| both("unlimited", "不限").to_string(), text);
    if limit.soft == limit.hard {
        text(limit.soft)
    } else {
        text!(
            "{} (at most {})",
            "{}（最多 {}）",
            text(limit.soft),
            text(limit.hard)
        )
        .to_string()
    }
}

fn storage(directory: &Storage) -> String {
    // The current directory often contains a person's name, so reports leave it out.
    let (path, what) = match directory.role {
        Role::Runs => (
            ".".to_string(),
            both("runs, unless --output is given", "运行，除非给出 --output"),
        ),
        Role::Temporary => (
            directory.path.display().to_string(),
            both("private files of jobs", "作业的私有文件"),
        ),
        Role::SharedMemory => (
            directory.path.display().to_string(),
            both("exchange between ranks", "rank 之间的数据交换"),
        ),
    };
    let kind = match &directory.file_system {
        Some(kind) => Text::literal(kind),
        None => both("unknown", "未知").into(),
    };
    let room = match (directory.free_bytes, directory.total_bytes) {
        (Some(free), Some(total)) => free_of(free, total),
        _ => both("missing", "不存在").into(),
    };
    let mut line = format!("{path:<10} {kind:<8} {room:<22} {what}");
    if !directory.is_writable {
        line += &both(" · not writable", " · 不可写").to_string();
    }
    line
}

fn free_of(free: u64, total: u64) -> Text {
    let (free, total) = (bytes(free), bytes(total));
    text!("{free} of {total} free", "{total} 中空闲 {free}")
}

fn driver(cuda: &Cuda, page: &mut Page) {
    let version = cuda.cuda_version.map(version_text);
    let minimum = cuda.minimum_cuda_version.map(version_text);
    page.line(
        both("driver", "驱动"),
        joined([
            Some(match cuda.pci_devices {
                0 => both("no NVIDIA GPU on the PCI bus", "PCI 总线上没有 NVIDIA GPU").to_string(),
                1 => both(
                    "1 NVIDIA GPU on the PCI bus",
                    "PCI 总线上有 1 块 NVIDIA GPU",
                )
                .to_string(),
                count => text!(
                    "{count} NVIDIA GPUs on the PCI bus",
                    "PCI 总线上有 {count} 块 NVIDIA GPU"
                )
                .to_string(),
            }),
            Some(match &cuda.kernel_module {
                Some(version) => text!("kernel module {version}", "内核模块 {version}").to_string(),
                None => both("no kernel module", "没有内核模块").to_string(),
            }),
            cuda.driver
                .as_ref()
                .map(|version| text!("libraries {version}", "库 {version}").to_string()),
            version.map(|version| format!("CUDA {version}")),
            minimum
                .map(|minimum| text!("CUDA {minimum} needed", "需要 CUDA {minimum}").to_string()),
        ]),
    );
    if let Some(problem) = cuda.problem_text() {
        page.line("", problem);
    }
}

const LIBRARY: Both = both("library", "库");

fn libraries(library: &LibraryFacts, page: &mut Page) {
    let Some(path) = &library.path else {
        let missing = text!("{} not found; tried", "没有找到 {}；尝试过", library.name);
        page.line(LIBRARY, missing);
        // Attempts with the same outcome are grouped.
        let mut outcomes: Vec<(Text, Vec<String>)> = Vec::new();
        for attempt in &library.attempts {
            let result = attempt.result();
            let known = outcomes.iter_mut().find(|(text, _)| *text == result);
            match known {
                Some((_, memory_plans)) => memory_plans.push(attempt.place.clone()),
                None => outcomes.push((result, vec![attempt.place.clone()])),
            }
        }
        for (outcome, memory_plans) in outcomes {
            page.list("", 2, &memory_plans);
            page.line(
                "",
                format!("    {}", outcome.to_string().replace('\n', " ")),
            );
        }
        return;
    };
    let version = library
        .version
        .as_ref()
        .map(|version| format!(" {version}"));
    page.line(
        LIBRARY,
        format!(
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
        page.line("gpus", both("none", "无"));
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
        Some(true) => page.line("", both("all equal", "全部相同")),
        Some(false) => page.line("", both("not equal", "不相同")),
        None => {}
    }
}

fn gpu_lines(gpu: &Gpu) -> Vec<String> {
    let free = match (gpu.free_bytes, gpu.memory_bytes) {
        (Some(free), Some(all)) => Some(free_of(free, all).to_string()),
        (None, Some(all)) => Some(bytes(all)),
        _ => None,
    };
    let identity = joined([
        Some(
            gpu.name
                .clone()
                .unwrap_or_else(|| both("does not respond", "没有响应").to_string()),
        ),
        gpu.compute_capability.map(|capability| {
            let version = version_text(capability);
            text!("compute capability {version}", "计算能力 {version}").to_string()
        }),
        gpu.multiprocessors
            .map(|count| text!("{count} multiprocessors", "{count} 个流式多处理器").to_string()),
        free,
    ]);
    let others = gpu.processes.as_ref().map(|processes| {
        if processes.is_empty() {
            return both("no other process", "没有其他进程").to_string();
        }
        let list: Vec<Text> = processes
            .iter()
            .map(|process| {
                let held = process.used_bytes.map_or("?".to_string(), bytes);
                text!("process {} uses {held}", "进程 {} 占用 {held}", process.pid)
            })
            .collect();
        Text::list(&list).to_string()
    });
    let link = gpu
        .pcie
        .generation
        .zip(gpu.pcie.width)
        .map(|(generation, width)| {
            let most = gpu.pcie.max_generation.zip(gpu.pcie.max_width);
            let most = most.map(|(generation, width)| {
                text!(
                    " (at most {generation} x{width})",
                    "（最多 {generation} x{width}）"
                )
            });
            format!("PCIe {generation} x{width}{}", most.unwrap_or_default())
        });
    let peers = gpu.peers.as_ref().map(|peers| {
        if peers.is_empty() {
            return both("no peer access", "没有对等访问").to_string();
        }
        let list: Vec<String> = peers.iter().map(ToString::to_string).collect();
        text!("peer access to {}", "可对等访问 {}", Text::list(&list)).to_string()
    });
    let nvlinks = gpu.nvlinks.filter(|links| *links > 0);
    let connections = joined([
        gpu.pci_bus_id.clone(),
        link,
        nvlinks.map(|links| text!("{links} NVLinks", "{links} 条 NVLink").to_string()),
        peers,
    ]);
    let use_now = joined([
        others,
        gpu.utilization_percent
            .map(|share| text!("{share} % busy", "{share} % 忙碌").to_string()),
        gpu.uncorrected_ecc_errors.map(|errors| {
            text!(
                "{errors} uncorrected memory errors",
                "{errors} 次不可纠正的显存错误"
            )
            .to_string()
        }),
        (gpu.ordinal.is_none()).then(|| both("hidden from CUDA", "对 CUDA 不可见").to_string()),
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
        (
            Kind::Read,
            both("variables that this program reads", "本程序读取的变量"),
        ),
        (
            Kind::ActsOnOthers,
            both(
                "variables that affect libraries and tools",
                "影响库和工具的变量",
            ),
        ),
        (
            Kind::WithoutEffect,
            both(
                "variables of other trainers: no effect here",
                "其他训练器的变量：在此没有效果",
            ),
        ),
    ] {
        page.blank();
        page.line(both("env", "环境"), title);
        for row in table.iter().filter(is_shown).filter(|row| row.kind == kind) {
            variable(row, width, page);
        }
    }
    let others = table.iter().filter(|row| !is_shown(row)).count();
    page.line(
        "",
        text!(
            "{others} more known variables are not set; --json lists them",
            "另有 {others} 个已知变量未设置；--json 会列出它们"
        ),
    );
}

fn variable(row: &Variable, width: usize, page: &mut Page) {
    let value: Text = match (&row.value, row.is_set) {
        (Some(value), _) if value.is_empty() => both("(empty)", "（空）").into(),
        (Some(value), _) if row.name.ends_with('*') => {
            let set = value.trim_end_matches(" set");
            text!("{set} set", "设置了 {set} 个")
        }
        (Some(value), _) => Text::literal(value),
        (None, true) => both("not shown", "不显示").into(),
        (None, false) => Text::literal("–"),
    };
    let blank = format!("{:<width$}  {:<VALUE_WIDTH$}", "", "");
    let head = format!("{:<width$}  {value:<VALUE_WIDTH$}", row.name);
    // A long value gets its own line.
    if columns(&value.to_string()) > VALUE_WIDTH {
        page.line("", &head);
        page.line("", format!("{blank}  {}", row.effect));
    } else {
        page.line("", format!("{head}  {}", row.effect));
    }
    if let Some(instead) = row.instead {
        let instead = text!("instead: {instead}", "请改用：{instead}");
        page.line("", format!("{blank}  {instead}"));
    }
}

fn counts(findings: &[Finding]) -> Text {
    let count = |severity: Severity, noun: Both| {
        let found = findings
            .iter()
            .filter(|finding| finding.severity == severity);
        match found.count() {
            0 => None,
            1 => Some(text!("1 {noun}", "1 个{noun}")),
            many => Some(text!("{many} {noun}s", "{many} 个{noun}")),
        }
    };
    let parts = [
        count(Severity::Problem, both("problem", "问题")),
        count(Severity::Warning, both("warning", "警告")),
        count(Severity::Note, both("note", "提示")),
    ];
    let parts: Vec<Text> = parts.into_iter().flatten().collect();
    if parts.is_empty() {
        both("no problems found", "没有发现问题").into()
    } else {
        Text::list(&parts)
    }
}
