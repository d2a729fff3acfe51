//! Pages about flags, model directories, checkpoints and disks.

use super::{Page, both};

pub(super) static RESUME: Page = Page {
    title: both("a checkpoint cannot be used", "无法使用检查点"),
    meaning: both(
        "The checkpoint is missing or damaged, or it does not fit this run: this run trains other parts, has another precision, or reads other data. World size, ZeRO stage and offload may differ.",
        "检查点缺失或已损坏，或与本次运行不匹配：训练的部分、精度或数据不同。rank 数、ZeRO 阶段和卸载方式可以不同。",
    ),
    causes: &[
        both(
            "--train, --freeze, --tune-vision, --tune-llm or the LoRA flags have other values than before.",
            "--train、--freeze、--tune-vision、--tune-llm 或 LoRA 参数与之前不同。",
        ),
        both(
            "The data file, --seed, --longest-first or the global batch differs, so the position in the data would change.",
            "数据文件、--seed、--longest-first 或全局批大小不同，数据中的位置会改变。",
        ),
        both(
            "A copy of the directory was interrupted.",
            "复制目录时中断。",
        ),
    ],
    look_at: &[
        both(
            "config.resolved.json of the run that saved the checkpoint, and MANIFEST.json of the checkpoint.",
            "保存该检查点的运行的 config.resolved.json，以及检查点的 MANIFEST.json。",
        ),
        both(
            "`launcher ckpt verify` lists damaged files; `launcher ckpt ls` lists the checkpoints of a run.",
            "`launcher ckpt verify` 会列出损坏的文件；`launcher ckpt ls` 会列出某次运行的检查点。",
        ),
    ],
    what_to_do: &[
        both(
            "Use the same trained parts, precision, data, seed and global batch as before.",
            "使用与之前相同的训练部分、精度、数据、随机种子和全局批大小。",
        ),
        both(
            "If the directory is damaged, give --resume an earlier checkpoint-N.",
            "如果目录已损坏，请用 --resume 指定更早的 checkpoint-N。",
        ),
    ],
    example: include_str!("examples/E08.txt"),
};

pub(super) static NOTHING_TO_DO: Page = Page {
    title: both("a resumed run has no step left", "继续的运行没有剩余步数"),
    meaning: both(
        "The checkpoint has already completed all steps of this run.",
        "该检查点已经完成了本次运行的全部步数。",
    ),
    causes: &[both(
        "The run had ended, and --max-steps or --num-train-epochs has not changed.",
        "运行已经结束，而 --max-steps 或 --num-train-epochs 没有改变。",
    )],
    look_at: &[both(
        "The number of steps under 'evidence'.",
        "evidence 中的步数。",
    )],
    what_to_do: &[both(
        "Raise --max-steps or --num-train-epochs to continue training.",
        "增大 --max-steps 或 --num-train-epochs 以继续训练。",
    )],
    example: include_str!("examples/E16.txt"),
};

pub(super) static USAGE: Page = Page {
    title: both("flags or configuration", "参数或配置错误"),
    meaning: both(
        "A flag is unknown, has an invalid value, or contradicts another flag. The program started no rank and wrote no file.",
        "某个参数未知、取值无效，或与其他参数矛盾。程序没有启动任何 rank，也没有写入任何文件。",
    ),
    causes: &[
        both(
            "A spelling mistake: the report names the nearest flag.",
            "拼写错误：报告会给出最接近的参数。",
        ),
        both(
            "A flag of another trainer that this program does not support.",
            "其他训练框架的参数，本程序不支持。",
        ),
        both(
            "A key of a configuration file is misplaced, unknown or not available. `launcher explain-config FILE` shows every key.",
            "配置文件中的某个键位置不对、未知或不可用。`launcher explain-config FILE` 会逐个说明。",
        ),
        both(
            "The --output directory contains another run. Runs are never overwritten.",
            "--output 目录中已有其他运行。程序从不覆盖已有的运行。",
        ),
    ],
    look_at: &[both(
        "`launcher --help`; docs/flags.md lists the defaults.",
        "`launcher --help`；默认值见 docs/flags.md。",
    )],
    what_to_do: &[both(
        "Change the flag in the title as 'next' says.",
        "按 next 的提示修改标题中的参数。",
    )],
    example: include_str!("examples/E09.txt"),
};

pub(super) static MODEL_FILES: Page = Page {
    title: both(
        "the model directory is incomplete or damaged",
        "模型目录不完整或已损坏",
    ),
    meaning: both(
        "A file of the model directory is missing, truncated, unreadable or a git-lfs pointer, or it does not fit the other files. Or the directory is of a kind that this program does not read.",
        "模型目录中的某个文件缺失、被截断、无法读取、只是 git-lfs 指针，或与其他文件不匹配；或者本程序不支持这种目录。",
    ),
    causes: &[
        both("A download was interrupted.", "下载中断。"),
        both(
            "`git clone` ran without git-lfs, so the weight files are short pointer texts.",
            "没有安装 git-lfs 就执行了 `git clone`，权重文件只是很短的指针文本。",
        ),
        both(
            "The weights are quantized (int4, AWQ, GPTQ), or in a torch file with more than tensors in it.",
            "权重是量化的（int4、AWQ、GPTQ），或所在的 torch 文件中不只有张量。",
        ),
        both(
            "The adapter is of a kind that is not implemented (DoRA, PiSSA, OLoRA, LoftQ, layer_replication).",
            "适配器属于未实现的类型（DoRA、PiSSA、OLoRA、LoftQ、layer_replication）。",
        ),
        both(
            "--model is the name of a model on the Hub. Nothing is downloaded.",
            "--model 是 Hub 上的模型名称。本程序不会下载任何文件。",
        ),
        both(
            "config.json and the weights belong to different models or versions, or a SAT checkpoint lacks a rank.",
            "config.json 与权重来自不同的模型或版本，或 SAT 检查点缺少某个 rank。",
        ),
    ],
    look_at: &[both(
        "The present and the expected number of bytes, and the first missing tensor.",
        "已有字节数与预期字节数，以及第一个缺失的张量。",
    )],
    what_to_do: &[
        both(
            "Do what 'next' in the report says; `git lfs pull` replaces pointers.",
            "按报告中 next 的提示操作；`git lfs pull` 会替换指针文件。",
        ),
        both(
            "Supported are the published directories of MiniCPM-V and -o 2.6, CogVLM, CogVLM2, CogAgent, GLM-4V and GLM-4.1V.",
            "支持官方发布的 MiniCPM-V 和 -o 2.6、CogVLM、CogVLM2、CogAgent、GLM-4V、GLM-4.1V 模型目录。",
        ),
    ],
    example: include_str!("examples/E10.txt"),
};

pub(super) static DISK: Page = Page {
    title: both(
        "the disk is full or cannot be written",
        "磁盘已满或无法写入",
    ),
    meaning: both(
        "The program could not write a file, or the disk is too small for the checkpoints. Earlier checkpoints stay intact.",
        "程序无法写入某个文件，或磁盘放不下检查点。更早的检查点不受影响。",
    ),
    causes: &[
        both(
            "All checkpoints are kept unless --save-total-limit limits their number.",
            "除非用 --save-total-limit 限制数量，否则会保留所有检查点。",
        ),
        both(
            "A quota is used up, or the directory belongs to another user.",
            "磁盘配额已用完，或目录属于其他用户。",
        ),
    ],
    look_at: &[both(
        "`df -h` of the directory, and the bytes in the report.",
        "该目录的 `df -h`，以及报告中的字节数。",
    )],
    what_to_do: &[
        both(
            "Free space or use --save-total-limit 1, then continue with --resume RUN, the directory of the run.",
            "释放空间或使用 --save-total-limit 1，然后用 --resume RUN（RUN 为运行目录）继续。",
        ),
        both(
            "Put --output on a larger disk.",
            "把 --output 放到更大的磁盘上。",
        ),
    ],
    example: include_str!("examples/E13.txt"),
};
