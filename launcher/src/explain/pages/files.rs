//! Flags, model folders, checkpoints and disks.

use super::{Page, both};

pub(super) static RESUME: Page = Page {
    title: both("a checkpoint cannot be resumed", "无法从检查点继续"),
    meaning: both(
        "The checkpoint is damaged, or this run trains other parts, in another precision, or on other data than the run that saved it. World size, ZeRO stage and offload may differ freely.",
        "检查点已损坏，或本次运行训练的部分、精度或数据与保存它的运行不同。rank 数、ZeRO 阶段和卸载方式可以任意改变。",
    ),
    causes: &[
        both(
            "Other --train, --freeze, --tune-vision, --tune-llm or LoRA flags than before.",
            "--train、--freeze、--tune-vision、--tune-llm 或 LoRA 参数与之前不同。",
        ),
        both(
            "Another data file, seed or global batch: the position in the data would change.",
            "数据文件、随机种子或全局批大小不同：数据位置会改变。",
        ),
        both("A copy of the folder that broke off.", "复制文件夹时中断。"),
    ],
    look_at: &[both(
        "config.resolved.json of the run that saved it, and MANIFEST.json of the checkpoint.",
        "保存该检查点的运行的 config.resolved.json，以及检查点的 MANIFEST.json。",
    )],
    what_to_do: &[
        both(
            "Use the same parts, precision, data and global batch as before.",
            "使用与之前相同的训练部分、精度、数据和全局批大小。",
        ),
        both(
            "Where the folder is damaged, --resume an earlier checkpoint-N.",
            "如果文件夹已损坏，请 --resume 更早的 checkpoint-N。",
        ),
    ],
    example: include_str!("examples/E08.txt"),
};

pub(super) static NOTHING_TO_DO: Page = Page {
    title: both(
        "a resumed run has nothing left to do",
        "继续的运行已无事可做",
    ),
    meaning: both(
        "The checkpoint has all steps of this run behind it already.",
        "该检查点已完成本次运行的全部步数。",
    ),
    causes: &[both(
        "The run had ended; --max-steps or --num-train-epochs are as before.",
        "运行已经结束，而 --max-steps 或 --num-train-epochs 没有改变。",
    )],
    look_at: &[both(
        "The number of steps under 'evidence'.",
        "evidence 中的步数。",
    )],
    what_to_do: &[both(
        "Raise --max-steps or --num-train-epochs to train on.",
        "增大 --max-steps 或 --num-train-epochs 以继续训练。",
    )],
    example: include_str!("examples/E16.txt"),
};

pub(super) static USAGE: Page = Page {
    title: both("flags or configuration", "参数或配置错误"),
    meaning: both(
        "A flag is unknown, has a value it does not take, or contradicts another one. Nothing was started and nothing was written.",
        "某个参数未知、取值无效或与其他参数矛盾。没有启动任何进程，也没有写入任何文件。",
    ),
    causes: &[
        both(
            "A slip of the pen: the nearest flag is named.",
            "拼写错误：报告会给出最接近的参数。",
        ),
        both(
            "A flag of another trainer whose effect cannot be had here.",
            "其他训练框架的参数，在此无法生效。",
        ),
        both(
            "A key of a configuration file that is misplaced, unknown or not available: `launcher explain-config FILE` shows each.",
            "配置文件中的某个键位置不对、未知或不可用：`launcher explain-config FILE` 逐个列出。",
        ),
        both(
            "An --output folder that holds another run: runs are never overwritten.",
            "--output 文件夹中已有其他运行：程序从不覆盖已有运行。",
        ),
    ],
    look_at: &[both(
        "`launcher --help`, and docs/flags.md for defaults.",
        "`launcher --help`，默认值见 docs/flags.md。",
    )],
    what_to_do: &[both(
        "Change the flags named in the title as 'next' says.",
        "按 next 的提示修改标题中提到的参数。",
    )],
    example: include_str!("examples/E09.txt"),
};

pub(super) static MODEL_FILES: Page = Page {
    title: both(
        "the model folder is incomplete or damaged",
        "模型文件夹不完整或已损坏",
    ),
    meaning: both(
        "A file of the model folder is missing, cut off, a git-lfs pointer, or does not fit the others.",
        "模型文件夹中的文件缺失、被截断、只是 git-lfs 指针，或与其他文件不匹配。",
    ),
    causes: &[
        both("A download that broke off.", "下载中断。"),
        both(
            "`git clone` without git-lfs: weight files are texts of 130 bytes.",
            "没有安装 git-lfs 就执行 `git clone`：权重文件只是约 130 字节的文本。",
        ),
        both(
            "config.json and weights of different models or versions.",
            "config.json 与权重来自不同的模型或版本。",
        ),
    ],
    look_at: &[both(
        "Bytes there and bytes expected, and the first missing tensor.",
        "已有字节数与预期字节数，以及第一个缺失的张量。",
    )],
    what_to_do: &[
        both(
            "Download the named file again; `git lfs pull` replaces pointers.",
            "重新下载报告中的文件；`git lfs pull` 会替换指针文件。",
        ),
        both(
            "Supported are folders of MiniCPM-V and -o 2.6, CogVLM, CogVLM2, CogAgent, GLM-4V and GLM-4.1V as published.",
            "支持官方发布的 MiniCPM-V 和 -o 2.6、CogVLM、CogVLM2、CogAgent、GLM-4V、GLM-4.1V 文件夹。",
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
        "A file of the run could not be written. A checkpoint is renamed into place when it is whole, so earlier ones are untouched.",
        "无法写入运行的文件。检查点只有在完整之后才会改名到位，因此更早的检查点不受影响。",
    ),
    causes: &[
        both(
            "Checkpoints of all steps are kept unless --save-total-limit says otherwise.",
            "除非设置 --save-total-limit，否则会保留所有步的检查点。",
        ),
        both(
            "A quota, or a folder that belongs to somebody else.",
            "磁盘配额限制，或文件夹属于其他用户。",
        ),
    ],
    look_at: &[both(
        "`df -h` of the folder, and the bytes needed under 'evidence'.",
        "该文件夹的 `df -h`，以及 evidence 中所需的字节数。",
    )],
    what_to_do: &[
        both(
            "Free space or use --save-total-limit 1, then --resume auto.",
            "释放空间或使用 --save-total-limit 1，然后 --resume auto。",
        ),
        both(
            "Another --output on a larger disk.",
            "把 --output 放到更大的磁盘上。",
        ),
    ],
    example: include_str!("examples/E13.txt"),
};
