//! Errors of the libraries in Chinese. A library's own text is English; a variant without a translation stays so.

use std::error::Error;
use std::io;

use engine::EngineError;
use engine::checkpoint::CheckpointError;
use engine::comm::CommError;
use engine::spill::SpillError;
use models::adapter::AdapterError;
use models::config::ConfigError;
use models::data::{DataError, SampleError};
use models::image::ImageError;
use models::processor::ProcessorError;
use models::text::{TemplateError, TokenizerError};
use models::torch_file::TorchError;
use models::weights::QuantizationFault;
use models::{ModelError, OpenError, WeightError};
use optim::OptimError;

/// The error without its sources in Chinese; `None` for an error that no library of this program made.
pub(super) fn chinese(error: &(dyn Error + 'static)) -> Option<String> {
    let first = error.downcast_ref().and_then(weights);
    first
        .or_else(|| error.downcast_ref().and_then(model))
        .or_else(|| error.downcast_ref().and_then(open))
        .or_else(|| error.downcast_ref().and_then(config))
        .or_else(|| error.downcast_ref().and_then(processor))
        .or_else(|| error.downcast_ref().and_then(torch))
        .or_else(|| error.downcast_ref().and_then(tokenizer))
        .or_else(|| error.downcast_ref().and_then(template))
        .or_else(|| error.downcast_ref().and_then(adapter))
        .or_else(|| error.downcast_ref().and_then(data))
        .or_else(|| error.downcast_ref().and_then(sample))
        .or_else(|| error.downcast_ref().and_then(image))
        .or_else(|| error.downcast_ref().and_then(engine))
        .or_else(|| error.downcast_ref().and_then(checkpoint))
        .or_else(|| error.downcast_ref().and_then(comm))
        .or_else(|| error.downcast_ref().and_then(spill))
        .or_else(|| error.downcast_ref().and_then(optimizer))
        .or_else(|| error.downcast_ref().and_then(system))
}

fn weights(error: &WeightError) -> Option<String> {
    Some(match error {
        WeightError::NoWeights { dir } => format!(
            "{} 中没有 model.safetensors，没有 pytorch_model.bin，也没有二者的索引",
            dir.display()
        ),
        WeightError::Read { path, .. } => format!("无法读取 {}", path.display()),
        WeightError::Write { path, .. } => format!("无法写入 {}", path.display()),
        WeightError::Torch { path, .. } => format!("{} 不能作为 torch 文件使用", path.display()),
        WeightError::Sat { dir, reason } => format!("SAT 检查点 {}：{reason}", dir.display()),
        WeightError::MissingRank { dir, rank, ranks } => match ranks {
            Some(ranks) => format!(
                "SAT 检查点 {} 缺少模型并行 rank {rank}（共 {ranks} 个）",
                dir.display()
            ),
            None => format!("SAT 检查点 {} 缺少模型并行 rank {rank}", dir.display()),
        },
        WeightError::Slices { name, reason } => format!("张量 {name}：{reason}"),
        WeightError::Indivisible { name, shape, ranks } => {
            format!("形状为 {shape:?} 的张量 {name} 无法分给 {ranks} 个 rank")
        }
        WeightError::NotInSat { name, reason } => format!("张量 {name}：{reason}"),
        WeightError::Truncated {
            path,
            expected_bytes,
            got_bytes,
        } => format!(
            "{} 不完整或已损坏：有 {got_bytes} 字节，而文件头描述的是 {expected_bytes} 字节",
            path.display()
        ),
        WeightError::Header { path, .. } => {
            format!(
                "{} 不是有效的 safetensors 头、索引或权重声明",
                path.display()
            )
        }
        WeightError::Declared { path, .. } => {
            format!("{} 声明了一个无法打开的模型的权重", path.display())
        }
        WeightError::ShardName { path, file } => {
            format!("{} 引用了 {file:?}，它不是普通的文件名", path.display())
        }
        WeightError::MissingTensor { name, dir } => {
            format!("{} 中缺少张量 {name}", dir.display())
        }
        WeightError::WrongShape {
            name,
            expected,
            got,
        } => {
            format!("张量 {name} 的形状为 {got:?}，而配置要求 {expected}")
        }
        WeightError::DType { name, got, wanted } => {
            format!("张量 {name} 的存储类型为 {got}，应为 F32、BF16 或 F16（转换为 {wanted}）")
        }
        WeightError::NotFinite {
            name, count, elems, ..
        } => {
            format!("张量 {name} 的 {elems} 个值中有 {count} 个不是有限值")
        }
        WeightError::Quantized { name, fault } => {
            format!("无法读取压缩存储的权重 {name}：{}", quantized(fault))
        }
        _ => return None,
    })
}

fn torch(error: &TorchError) -> Option<String> {
    Some(match error {
        TorchError::Read(_) => "无法读取该文件".to_owned(),
        TorchError::Layout(reason) => format!("文件的结构：{reason}"),
        TorchError::Record { record, reason } => format!("压缩包中的记录 {record:?}：{reason}"),
        TorchError::Pickle { at, reason } => format!("pickle 在第 {at} 字节处损坏：{reason}"),
        TorchError::Code { name } => {
            format!("pickle 需要 {name}，而 state dict 用不到它；没有执行任何内容")
        }
        TorchError::Tensor { name, reason } => format!("张量 {name:?}：{reason}"),
        _ => return None,
    })
}

fn quantized(fault: &QuantizationFault) -> String {
    match fault {
        QuantizationFault::State(_) => "quant_state 不是已知格式的 JSON".to_owned(),
        QuantizationFault::Field { field, value } => format!("{field} 为 {value}"),
        QuantizationFault::Missing { part } => format!("缺少 {part}"),
        QuantizationFault::Size {
            part,
            dtype,
            got_bytes,
            expected,
            expected_bytes,
        } => format!("{part} 为 {dtype}，{got_bytes} 字节，应为 {expected}，{expected_bytes} 字节"),
        QuantizationFault::Table { part } => format!("{part} 不是 bitsandbytes 的表"),
        QuantizationFault::NotFinite => "某个缩放值不是有限值".to_owned(),
        _ => fault.to_string(),
    }
}

fn model(error: &ModelError) -> Option<String> {
    Some(match error {
        ModelError::Engine(inner) => return chinese(inner),
        ModelError::Weights(inner) => return weights(inner),
        ModelError::Config {
            field,
            value,
            reason,
        } => {
            format!("模型配置：{field} 为 {value}：{reason}")
        }
        ModelError::Selection { word, reason } => format!("部分列表中的 {word:?}：{reason}"),
        ModelError::QuantizedTrains { name } => format!("{name} 以 4 位或 8 位压缩存储，不能训练"),
        ModelError::NothingQuantized => "没有选中任何不训练的线性层来压缩存储".to_owned(),
        ModelError::AdapterTarget { target, reason } => {
            format!("适配器目标 {target:?}：{reason}")
        }
        ModelError::SavedModule { module } => {
            format!("要完整训练的模块 {module:?}：模型中没有这个模块")
        }
        ModelError::NotFinite { prompt, token } => {
            format!("对第 {prompt} 个提示的回答中，第 {token} 个 token 的分数为无穷大或 NaN")
        }
        ModelError::Sample { sample, reason } => format!("样本 {sample}：{reason}"),
        _ => return None,
    })
}

/// Messages of the operating system for the usual kinds of errors, with its number.
fn system(error: &io::Error) -> Option<String> {
    use io::ErrorKind;
    let number = error.raw_os_error()?;
    let message = match error.kind() {
        ErrorKind::NotFound => "没有那个文件或目录",
        ErrorKind::PermissionDenied => "权限不够",
        ErrorKind::AlreadyExists => "文件已存在",
        ErrorKind::NotADirectory => "不是目录",
        ErrorKind::IsADirectory => "是一个目录",
        ErrorKind::DirectoryNotEmpty => "目录非空",
        ErrorKind::ReadOnlyFilesystem => "只读文件系统",
        ErrorKind::StorageFull => "设备上没有空间",
        ErrorKind::QuotaExceeded => "超出磁盘配额",
        ErrorKind::OutOfMemory => "无法分配内存",
        ErrorKind::InvalidInput => "无效的参数",
        ErrorKind::AddrInUse => "地址已在使用",
        ErrorKind::ConnectionRefused => "拒绝连接",
        ErrorKind::ConnectionReset => "连接被对方重置",
        ErrorKind::BrokenPipe => "断开的管道",
        ErrorKind::TimedOut => "连接超时",
        _ => return None,
    };
    Some(format!("{message} (os error {number})"))
}

fn optimizer(error: &OptimError) -> Option<String> {
    Some(match error {
        OptimError::BadPattern { pattern, .. } => {
            format!("学习率的模式 `{pattern}` 不是正则表达式")
        }
        OptimError::OutOfRange {
            what,
            expected,
            got,
        } => format!("{what} 为 {got}，不在允许的范围内（{expected}）"),
        _ => return None,
    })
}

fn open(error: &OpenError) -> Option<String> {
    match error {
        OpenError::Files(files) => processor(files),
        OpenError::Model(inner) => model(inner),
        _ => None,
    }
}

fn config(error: &ConfigError) -> Option<String> {
    Some(match error {
        ConfigError::Read { path, .. } => format!("无法读取 {}", path.display()),
        ConfigError::Json { path, .. } => format!("{} 不是有效的模型配置", path.display()),
        ConfigError::UnsupportedModel { found } => format!("不支持模型类型 \"{found}\""),
        ConfigError::KnownCheckpoint {
            name,
            reason,
            nearest,
        } => {
            format!("不支持 {name}：{reason}；可用的最接近的检查点是 {nearest}")
        }
        ConfigError::Quantized { method } => {
            format!(
                "quantization_config 表明权重是量化的（{method}）；该模型读取 f32、bf16、f16 和 bitsandbytes 的权重"
            )
        }
        ConfigError::Unsupported {
            field,
            found,
            expected,
        } => {
            format!("不支持 {field} = {found}，应为 {expected}")
        }
        ConfigError::Inconsistent {
            field,
            found,
            reason,
        } => {
            format!("{field} = {found} 无效：{reason}")
        }
        _ => return None,
    })
}

fn processor(error: &ProcessorError) -> Option<String> {
    Some(match error {
        ProcessorError::Config(inner) => return config(inner),
        ProcessorError::Tokenizer(inner) => return tokenizer(inner),
        ProcessorError::Template(inner) => return template(inner),
        ProcessorError::Read { path, .. } => format!("无法读取 {}", path.display()),
        ProcessorError::NoSettings { dir } => format!(
            "{} 中既没有 preprocessor_config.json，processor_config.json 中也没有 image_processor",
            dir.display()
        ),
        ProcessorError::TwoSettings { dir, own, nested } => format!(
            "{} 的 {own} 与 processor_config.json 中的 {nested} 不同；请删除训练时没有使用的那个",
            dir.display()
        ),
        ProcessorError::Json { path, .. } => format!("{} 无效", path.display()),
        ProcessorError::Disagree {
            field,
            config,
            preprocessor,
        } => format!(
            "{field} 在 config.json 中为 {config}，在 preprocessor_config.json 中为 {preprocessor}"
        ),
        ProcessorError::Normalization { mean, std } => {
            format!("norm_mean {mean:?} 和 norm_std {std:?} 无法用于归一化")
        }
        _ => return None,
    })
}

fn tokenizer(error: &TokenizerError) -> Option<String> {
    Some(match error {
        TokenizerError::Read { path, .. } => format!("无法读取 {}", path.display()),
        TokenizerError::NoVocabulary { dir } => format!(
            "{} 中既没有 tokenizer.json，也没有 tokenizer.model",
            dir.display()
        ),
        TokenizerError::Invalid { path, reason } => format!("{} 无效：{reason}", path.display()),
        TokenizerError::Ranks { path, .. } => {
            format!("{} 不是有效的 token 与序号列表", path.display())
        }
        TokenizerError::SentencePiece { path, .. } => {
            format!("{} 不是可用的 sentencepiece 模型", path.display())
        }
        TokenizerError::MissingToken { token } => format!("分词器中没有 token {token:?}"),
        TokenizerError::IdMismatch {
            path,
            token,
            stated,
            found,
        } => format!(
            "token {token:?} 的 id 为 {found}，而 {} 中写的是 {stated}",
            path.display()
        ),
        TokenizerError::Encode { bytes, reason } => {
            format!("无法编码 {bytes} 字节的文本：{reason}")
        }
        TokenizerError::Decode { tokens, reason } => {
            format!("无法解码 {tokens} 个 token：{reason}")
        }
        _ => return None,
    })
}

fn template(error: &TemplateError) -> Option<String> {
    Some(match error {
        TemplateError::Read { path, .. } => format!("无法读取 {}", path.display()),
        TemplateError::Invalid { path, reason } => format!("{} 无效：{reason}", path.display()),
        TemplateError::Missing { dir } => format!("{} 中没有对话模板", dir.display()),
        TemplateError::Syntax(_) => "对话模板无法解析".to_owned(),
        TemplateError::Render { messages, .. } => {
            format!("对话模板在 {messages} 条消息的对话上出错")
        }
        _ => return None,
    })
}

fn adapter(error: &AdapterError) -> Option<String> {
    Some(match error {
        AdapterError::Nothing { dir } => format!(
            "{} 中没有 adapter_model.safetensors、adapter_model.bin 或 trained.safetensors",
            dir.display()
        ),
        AdapterError::Config { path, .. } => format!("无法读取 {}", path.display()),
        AdapterError::Unsupported { path, key, value } => {
            format!("{} 要求 {key} = {value}，本程序没有实现", path.display())
        }
        AdapterError::Halves { module, reason } => {
            format!("{module} 的适配器不完整：{reason}")
        }
        AdapterError::Weights(inner) => return weights(inner),
        _ => return None,
    })
}

fn data(error: &DataError) -> Option<String> {
    Some(match error {
        DataError::Read { path, .. } => format!("无法读取 {}", path.display()),
        DataError::Empty { path } => format!("{} 中没有样本", path.display()),
        DataError::UnknownFormat { path, found } => {
            format!("{} 的格式未知：{found}", path.display())
        }
        DataError::AmbiguousFormat { path, reason } => {
            format!("{} 的格式不明确：{reason}", path.display())
        }
        DataError::NoImage { label, images } => {
            format!(
                "{} 没有描述 {} 中的任何图片",
                label.display(),
                images.display()
            )
        }
        DataError::OtherImage { label, image } => format!(
            "{} 是 {} 的图片，但不是 PNG、JPEG、WebP、BMP、GIF 或 TIFF 文件：请转换它",
            image.display(),
            label.display()
        ),
        DataError::NoLabel { image, labels } => {
            format!("{} 在 {} 中没有标签", image.display(), labels.display())
        }
        _ => return None,
    })
}

fn sample(error: &SampleError) -> Option<String> {
    Some(match error {
        SampleError::TooFewTurns { turns, needed } => {
            format!("对话只有 {turns} 轮，至少需要 {needed} 轮")
        }
        SampleError::FirstRoleNotUser { role } => {
            format!("第一轮的角色是 {role:?}，而不是 \"user\"")
        }
        SampleError::UnknownRole { turn, role } => format!("第 {turn} 轮的角色 {role:?} 未知"),
        SampleError::TurnOrder { turn, role } => {
            format!("第 {turn} 轮的角色是 {role:?}，而此处应轮到另一方")
        }
        SampleError::ContextTooLong { tokens, limit } => {
            format!("回答之前有 {tokens} 个 token，没有给回答留下空间；最多可以有 {limit} 个")
        }
        SampleError::NoAssistantTurn { turns } => {
            format!("{turns} 轮中没有角色为 \"assistant\" 的一轮")
        }
        SampleError::NoSupervisedTurn { answers } => {
            format!("数据把模型要学习的全部回答（{answers} 个）都排除在损失之外")
        }
        SampleError::Metadata { turn } => {
            format!("第 {turn} 轮带有 metadata 或调用了工具，模型的模板无法写出")
        }
        SampleError::LaterImage { turn } => {
            format!("图片位于第 {turn} 轮，而模型只接受位于用户第一轮的图片")
        }
        SampleError::MisplacedImage { turn, role } => format!(
            "图片或视频位于第 {turn} 轮（{role}），而只有用户和工具的轮次可以带图片或视频；要把标记当作普通文本，请在 JSON 中写 \\\\<image>"
        ),
        SampleError::UnknownPlaceholder { name, known } => {
            format!("文本提到了 {name}，但图片有 {known:?}")
        }
        SampleError::MorePlaceholdersThanImages {
            placeholders,
            images,
        } => {
            format!("有 {placeholders} 个图片占位符，但只有 {images} 张图片")
        }
        SampleError::UnusedImage { name } => format!("文本没有提到图片 {name}"),
        SampleError::Image { name, .. } => format!("图片 {name}"),
        SampleError::NoImage => {
            "样本没有图片，而模型的 cross attention 在每一层都要读取图片".to_owned()
        }
        SampleError::TooManyImages { images, limit } => {
            format!("样本有 {images} 张图片，模型最多接受 {limit} 张")
        }
        SampleError::Video => "样本带有视频，而该模型不读取视频".to_owned(),
        SampleError::VideoFrames { video, reason } => format!("视频 {video}：{reason}"),
        SampleError::Thinking => "样本设置了 enable_thinking，而模型的模板没有该开关".to_owned(),
        SampleError::AspectRatio {
            name,
            width,
            height,
        } => {
            format!("图片 {name}（{width} x {height} 像素）的长宽比过大")
        }
        SampleError::Template(inner) => return template(inner),
        SampleError::Tokenizer(inner) => return tokenizer(inner),
        SampleError::TokenOutOfRange {
            id,
            position,
            vocab_size,
        } => {
            format!("位置 {position} 的 token {id} 超出模型的词表（{vocab_size}）")
        }
        SampleError::UnpairedImageMarkers {
            starts,
            ends,
            tokens,
            kept,
        } => format!(
            "在 {tokens} 个 token 的前 {kept} 个中，有 {starts} 个图片开始标记，却有 {ends} 个图片结束标记"
        ),
        SampleError::WrongImageSpan {
            index,
            start,
            end,
            expected,
        } => {
            format!("图片区间 {index} 为 {start}..{end}，应有 {expected} 个 token")
        }
        SampleError::NoSupervisedToken { tokens, kept, .. } => {
            format!("在 {tokens} 个 token 的前 {kept} 个中没有被监督的 token")
        }
        _ => return None,
    })
}

fn image(error: &ImageError) -> Option<String> {
    Some(match error {
        ImageError::Missing { path } => format!("图片文件 {} 不存在", path.display()),
        ImageError::Unreadable { path, reason } => {
            format!("无法读取图片文件 {}：{reason}", path.display())
        }
        ImageError::UnknownFormat { path } => {
            format!(
                "图片文件 {} 不是 PNG、JPEG、WebP、BMP、GIF 或 TIFF 文件",
                path.display()
            )
        }
        ImageError::Corrupt { path, reason } => {
            format!("图片文件 {} 已损坏：{reason}", path.display())
        }
        ImageError::TooLarge {
            path,
            width,
            height,
            file_bytes,
        } => format!(
            "图片文件 {} 过大：{width} x {height} 像素，{file_bytes} 字节",
            path.display()
        ),
        ImageError::OutsideDirectory { path, root } => format!(
            "图片文件 {} 位于数据目录 {} 之外",
            path.display(),
            root.display()
        ),
        _ => return None,
    })
}

fn engine(error: &EngineError) -> Option<String> {
    Some(match error {
        EngineError::Comm(inner) => return comm(inner),
        EngineError::Checkpoint(inner) => return checkpoint(inner),
        EngineError::Spill(inner) => return spill(inner),
        EngineError::NoSpillDirectory { kind } => {
            format!("计划把状态放在 nvme 层级，但本 rank 没有 {kind} 的溢出目录")
        }
        EngineError::Map { bytes, .. } => format!("无法映射 {bytes} 字节的主机内存"),
        EngineError::Thread(_) => "无法启动线程".to_owned(),
        EngineError::Load { param, .. } => format!("无法加载 {param}"),
        EngineError::LibraryDiffers { rank, theirs, ours } => {
            format!("rank {rank} 的 NCCL 为 {theirs}，本 rank 的为 {ours}")
        }
        EngineError::PlanDiffers { rank, theirs, ours } => {
            format!("rank {rank} 的计划为 {theirs}，本 rank 的为 {ours}")
        }
        _ => return None,
    })
}

fn checkpoint(error: &CheckpointError) -> Option<String> {
    Some(match error {
        CheckpointError::Io { path, .. } => format!("无法处理 {}", path.display()),
        CheckpointError::NoSpace {
            path, needed_bytes, ..
        } => {
            format!("没有空间写入 {}（{needed_bytes} 字节）", path.display())
        }
        CheckpointError::MissingFile { path } => format!("缺少 {}", path.display()),
        CheckpointError::WrongLength {
            path,
            expected,
            found,
        } => format!("{} 有 {found} 字节，而清单中为 {expected}", path.display()),
        CheckpointError::HashMismatch {
            path,
            expected,
            found,
        } => format!(
            "{} 已损坏：其哈希为 {found}，应为 {expected}",
            path.display()
        ),
        CheckpointError::Json { path, .. } => format!("无法解析 {}", path.display()),
        CheckpointError::Malformed { path, what } => format!("{} 无效：{what}", path.display()),
        CheckpointError::UnsupportedVersion {
            path,
            found,
            supported,
        } => format!(
            "{} 的格式版本为 {found}，本程序读取 {supported}",
            path.display()
        ),
        CheckpointError::UnsafePath { path } => format!("`{path}` 不是检查点内的路径"),
        CheckpointError::Coverage {
            kind,
            name,
            element,
            elems,
            ..
        } => {
            format!("`{name}` 的 {kind} 在第 {element} 个元素（共 {elems} 个）处不完整")
        }
        CheckpointError::BadTensor { kind, name, what } => {
            format!("`{name}` 的 {kind}：{what}")
        }
        CheckpointError::UnknownTensor { kind, name } => {
            format!("检查点中没有 `{name}` 的 {kind}")
        }
        CheckpointError::RankIncomplete { rank, path } => {
            format!("rank {rank} 没有写完这个检查点：{}", path.display())
        }
        CheckpointError::ForeignDirectory { path } => {
            format!("{} 已存在，但不是本程序的检查点", path.display())
        }
        _ => return None,
    })
}

fn comm(error: &CommError) -> Option<String> {
    Some(match error {
        CommError::InvalidWorld { rank, size } => {
            format!("rank {rank} 不在 {size} 个 rank 之内")
        }
        CommError::Mismatch {
            sequence,
            first,
            second,
        } => format!(
            "第 {sequence} 次集合通信不一致：rank {} 发起 {}，rank {} 发起 {}",
            first.rank, first.op, second.rank, second.op
        ),
        CommError::Timeout {
            noticed_by,
            sequence,
            op,
            elapsed,
            ..
        } => format!(
            "rank {noticed_by} 在第 {sequence} 次集合通信中等待了 {:.1} 秒：{op}",
            elapsed.as_secs_f64()
        ),
        CommError::Aborted { by_rank, reason } => format!("rank {by_rank} 中止：{reason}"),
        CommError::Altered {
            noticed_by,
            from,
            sequence,
            ..
        } => format!(
            "rank {noticed_by} 在第 {sequence} 次集合通信中收到来自 rank {from} 的、被改动的帧"
        ),
        CommError::Rendezvous {
            arrived,
            missing,
            elapsed,
        } => format!(
            "rank {missing:?} 在 {:.1} 秒内没有加入（已加入：{arrived:?}）",
            elapsed.as_secs_f64()
        ),
        CommError::AlreadyJoined { rank, path } => {
            format!("rank {rank} 已经加入 {}", path.display())
        }
        CommError::Stopped => "在等待其他 rank 时被停止".to_owned(),
        CommError::Io { path, .. } => format!("无法处理 {}", path.display()),
        _ => return None,
    })
}

fn spill(error: &SpillError) -> Option<String> {
    Some(match error {
        SpillError::NoSpace {
            path,
            asked_bytes,
            free_bytes,
        } => format!(
            "{} 需要 {asked_bytes} 字节的溢出空间，空闲 {free_bytes}",
            path.display()
        ),
        SpillError::Taken { path } => {
            format!("{} 已存在：另一个作业正在使用该目录", path.display())
        }
        SpillError::Io { path, .. } => format!("无法处理 {}", path.display()),
        SpillError::Closed => "磁盘队列已经结束".to_owned(),
        _ => return None,
    })
}
