//! Samples, and what training makes of them.

use super::{Page, both};

pub(super) static NUMERIC: Page = Page {
    title: both("loss or gradients are not finite", "损失或梯度不是有限值"),
    meaning: both(
        "The loss or a gradient became NaN or infinite. Such updates are never applied; after 20 in a row the run ends. The report names the first value that was not finite, found by running the micro-batch forward once more.",
        "损失或梯度变成 NaN 或无穷大。这样的更新不会被应用；连续 20 次后运行结束。报告会给出第一个非有限值，它是把该微批再次前向计算后找到的。",
    ),
    causes: &[
        both(
            "The learning rate is too high, or gradient clipping is off.",
            "学习率过高，或关闭了梯度裁剪。",
        ),
        both(
            "A sample far from the others: look at the ids.",
            "某个样本与其他样本差异很大：查看其 id。",
        ),
        both(
            "Weights that are not finite already: a damaged model folder or checkpoint.",
            "权重本身已不是有限值：模型文件夹或检查点已损坏。",
        ),
    ],
    look_at: &[
        both(
            "The losses and gradient norms before: growth over several steps means the learning rate, a sudden jump means a sample.",
            "之前的损失和梯度范数：若在数步内增长，多为学习率问题；若突然跳变，多为样本问题。",
        ),
        both(
            "errors/batch-N.json: samples of every rank and micro-batch of that step.",
            "errors/batch-N.json：该步所有 rank 和微批的样本。",
        ),
    ],
    what_to_do: &[
        both(
            "Lower --learning-rate or set --max-grad-norm 1, and resume from the checkpoint that is named as good.",
            "降低 --learning-rate 或设置 --max-grad-norm 1，并从报告指出的完好检查点继续。",
        ),
        both(
            "--precision f32 tells whether the number format is the cause.",
            "--precision f32 可以判断是否由数值格式引起。",
        ),
    ],
    example: include_str!("examples/E05.txt"),
};

pub(super) static SAMPLES: Page = Page {
    title: both("samples cannot be trained on", "样本无法用于训练"),
    meaning: both(
        "Samples have nothing to learn from: no answer of the assistant, or the answer (or half a picture) lies beyond --model-max-length. A picture is never cut in two.",
        "样本没有可学习的内容：没有 assistant 的回答，或回答（或半张图片）超出了 --model-max-length。图片不会被切成两半。",
    ),
    causes: &[
        both(
            "Large pictures become up to 10 slices, each of many tokens.",
            "大图片最多变成 10 个切片，每个切片有许多 token。",
        ),
        both(
            "Roles other than user and assistant, or a conversation that ends with the question.",
            "使用了 user 和 assistant 以外的角色，或对话以问题结尾。",
        ),
    ],
    look_at: &[
        both(
            "The counts in 'cause' and the lengths in 'evidence'.",
            "cause 中的计数和 evidence 中的长度。",
        ),
        both(
            "`launcher data check FILE --model DIR` lists every problem with statistics.",
            "`launcher data check FILE --model DIR` 会列出所有问题和统计信息。",
        ),
    ],
    what_to_do: &[
        both(
            "The --model-max-length under 'next' is computed so that all samples fit.",
            "next 中的 --model-max-length 是计算得出的，可容纳所有样本。",
        ),
        both(
            "--max-slice-nums 1 makes pictures short; fine print is lost.",
            "--max-slice-nums 1 会使图片变短，但会丢失细小文字。",
        ),
        both(
            "--skip-bad-samples true leaves them out and lists them in data_problems.jsonl.",
            "--skip-bad-samples true 会跳过这些样本并列在 data_problems.jsonl 中。",
        ),
    ],
    example: include_str!("examples/E06.txt"),
};

pub(super) static PLACEHOLDERS: Page = Page {
    title: both("placeholders and pictures disagree", "占位符与图片不一致"),
    meaning: both(
        "The text of a sample names pictures that its list does not have, or the other way round.",
        "样本文本提到了列表中没有的图片，或列表中的图片从未在文本中出现。",
    ),
    causes: &[
        both(
            "<image> twice for one picture; several pictures need <image_00>, <image_01>.",
            "一张图片写了两次 <image>；多张图片需要写 <image_00>、<image_01>。",
        ),
        both(
            "A conversion that dropped a picture.",
            "转换数据时丢失了图片。",
        ),
    ],
    look_at: &[both(
        "The line and message named under 'evidence'.",
        "evidence 中给出的行和消息。",
    )],
    what_to_do: &[both(
        "Mend the line, or leave such samples out with --skip-bad-samples true.",
        "修正该行，或用 --skip-bad-samples true 跳过这些样本。",
    )],
    example: include_str!("examples/E07.txt"),
};

pub(super) static DATA_FILE: Page = Page {
    title: both(
        "a data file or picture cannot be read",
        "无法读取数据文件或图片",
    ),
    meaning: both(
        "The list of samples is not valid JSON of the expected form, or a picture is missing, damaged or outside the folder of the data file.",
        "样本列表不是预期格式的有效 JSON，或图片缺失、损坏或位于数据文件所在文件夹之外。",
    ),
    causes: &[
        both(
            "Relative paths of pictures start at the folder of the data file.",
            "图片的相对路径以数据文件所在文件夹为起点。",
        ),
        both(
            "An upload that broke off: the header is fine and the rest is missing.",
            "上传中断：文件头完好，其余部分缺失。",
        ),
    ],
    look_at: &[both(
        "The line and column for JSON, the path for pictures.",
        "JSON 看行号和列号，图片看路径。",
    )],
    what_to_do: &[
        both(
            "Mend or replace the named file.",
            "修正或替换报告中的文件。",
        ),
        both(
            "--skip-bad-samples true leaves samples with bad pictures out.",
            "--skip-bad-samples true 会跳过图片损坏的样本。",
        ),
    ],
    example: include_str!("examples/E18.txt"),
};
