//! Pages about samples and training values.

use super::{Page, both};

pub(super) static NUMERIC: Page = Page {
    title: both(
        "a loss, gradient or weight is not finite",
        "损失、梯度或权重不是有限值",
    ),
    meaning: both(
        "In training, the loss or a gradient became NaN or infinite. Such updates are skipped; after 20 in a row the run ends. Loading, evaluation, generation and export end at the first value. The report names it.",
        "训练时损失或梯度变成了 NaN 或无穷大，这样的更新会被跳过；连续 20 次后运行结束。加载、评估、生成和导出遇到第一个非有限值就会结束。报告会给出这个值。",
    ),
    causes: &[
        both(
            "The learning rate is too high, or gradient clipping is off.",
            "学习率过高，或关闭了梯度裁剪。",
        ),
        both(
            "A sample differs a lot from the others: see the sample ids.",
            "某个样本与其他样本差异很大：请查看样本 id。",
        ),
        both(
            "The weights are already not finite: the model directory or the checkpoint is damaged.",
            "权重本身已不是有限值：模型目录或检查点已损坏。",
        ),
        both(
            "A weight leaves the range of f16, which ends at 65504, in --precision fp16 or --dtype f16.",
            "使用 --precision fp16 或 --dtype f16 时，某个权重超出了 f16 的范围（最大 65504）。",
        ),
    ],
    look_at: &[
        both(
            "The last losses and gradient norms: steady growth points to the learning rate, a sudden jump to a sample.",
            "最后几步的损失和梯度范数：若在数步内持续增长，多为学习率问题；若突然跳变，多为样本问题。",
        ),
        both(
            "errors/batch-N.json: the samples of every rank and micro-batch of that step.",
            "errors/batch-N.json：该步所有 rank 和微批的样本。",
        ),
    ],
    what_to_do: &[
        both(
            "Lower --learning-rate or set --max-grad-norm 1, and resume from the good checkpoint in the report.",
            "降低 --learning-rate 或设置 --max-grad-norm 1，并从报告给出的完好检查点继续。",
        ),
        both(
            "--precision f32 shows whether the number format is the cause.",
            "--precision f32 可以判断数值格式是否是原因。",
        ),
    ],
    example: include_str!("examples/E05.txt"),
};

pub(super) static SAMPLES: Page = Page {
    title: both("samples cannot be used for training", "样本无法用于训练"),
    meaning: both(
        "Some samples have no supervised token: the assistant gives no answer, or --model-max-length cuts off the answer or would cut an image in two.",
        "有些样本没有可监督的 token：没有 assistant 的回答，或者 --model-max-length 截掉了回答，或者会把图片截成两半。",
    ),
    causes: &[
        both(
            "Large images are split into several slices, each of many tokens.",
            "大图片会被切成多个切片，每个切片有许多 token。",
        ),
        both(
            "The roles are not user and assistant, or the conversation ends with a question.",
            "角色不是 user 和 assistant，或对话以问题结尾。",
        ),
    ],
    look_at: &[
        both(
            "The counts in 'cause' and the lengths in 'evidence'.",
            "“原因”（cause）中的计数和“依据”（evidence）中的长度。",
        ),
        both(
            "`launcher data check FILE --model DIR` lists every problem, with statistics.",
            "`launcher data check FILE --model DIR` 会列出所有问题和统计信息。",
        ),
    ],
    what_to_do: &[
        both(
            "The value of --model-max-length under 'next' is enough for all of these samples.",
            "“下一步”（next）中的 --model-max-length 足以容纳所有这些样本。",
        ),
        both(
            "--max-slice-nums 1 makes images short, but small print becomes unreadable.",
            "--max-slice-nums 1 会使图片变短，但细小文字会看不清。",
        ),
        both(
            "--skip-bad-samples true skips these samples and lists them in data_problems.jsonl.",
            "--skip-bad-samples true 会跳过这些样本，并记录在 data_problems.jsonl 中。",
        ),
    ],
    example: include_str!("examples/E06.txt"),
};

pub(super) static PLACEHOLDERS: Page = Page {
    title: both("placeholders and images disagree", "占位符与图片不一致"),
    meaning: both(
        "The text of a sample names images that are not in its list, or its list has images that the text does not name.",
        "样本的文本提到了列表中没有的图片，或列表中的图片没有在文本中出现。",
    ),
    causes: &[
        both(
            "<image> appears twice for one image. Several images need <image_00>, <image_01>.",
            "一张图片写了两次 <image>。多张图片需要写 <image_00>、<image_01>。",
        ),
        both(
            "A conversion of the data dropped an image.",
            "转换数据时丢失了图片。",
        ),
    ],
    look_at: &[both(
        "The line and the message under 'evidence'.",
        "“依据”（evidence）中给出的行和消息。",
    )],
    what_to_do: &[both(
        "Fix the line, or skip such samples with --skip-bad-samples true.",
        "修正该行，或用 --skip-bad-samples true 跳过这样的样本。",
    )],
    example: include_str!("examples/E07.txt"),
};

pub(super) static DATA_FILE: Page = Page {
    title: both(
        "a data file or an image cannot be read",
        "无法读取数据文件或图片",
    ),
    meaning: both(
        "The list of samples is not valid JSON of the expected form. Or an image is missing, damaged, or outside the directory of the data file.",
        "样本列表不是预期格式的有效 JSON；或者图片缺失、损坏，或位于数据文件所在目录之外。",
    ),
    causes: &[
        both(
            "Relative paths of images do not start at the directory of the data file.",
            "图片的相对路径没有以数据文件所在目录为起点。",
        ),
        both(
            "A key of a sample asks for something that a run does not do, such as a video, or an answer marked as disliked.",
            "样本中的某个键要求训练做不到的事，例如视频，或被标记为不喜欢的回答。",
        ),
        both(
            "An upload was interrupted: the header of the file is intact and the rest is missing.",
            "上传中断：文件头完好，其余部分缺失。",
        ),
    ],
    look_at: &[both(
        "For JSON, the line and column; for images, the path.",
        "JSON 看行号和列号，图片看路径。",
    )],
    what_to_do: &[
        both(
            "Fix or replace the file in the report.",
            "修正或替换报告中的文件。",
        ),
        both(
            "--skip-bad-samples true skips samples with bad images.",
            "--skip-bad-samples true 会跳过图片损坏的样本。",
        ),
    ],
    example: include_str!("examples/E18.txt"),
};
