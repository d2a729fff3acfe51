//! Failures of the command line that clap finds, in both languages.

use std::error::Error;
use std::num::{IntErrorKind, ParseFloatError, ParseIntError};

use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::error::Failure;
use crate::lang::{Lang, Text, both};

/// What clap lists behind the values of a flag.
const VALUES: &str = "[possible values: ";

/// Usage failure with the first paragraph of clap's message; its usage text does not help here.
pub(super) fn usage_from(error: &clap::Error) -> Failure {
    let text = error.render().to_string();
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let title = lines
        .next()
        .unwrap_or("bad command line")
        .trim_start_matches("error: ");
    let detail = lines.find(|line| line.starts_with('['));
    let chinese = chinese(error).unwrap_or_else(|| title.to_owned());
    let mut failure = Failure::usage(
        Text::new(title, chinese),
        both("a flag has a value it does not take", "某个参数的值不可用"),
    );
    if let Some(detail) = detail {
        failure = failure.evidence(Text::new(detail, detail.replace(VALUES, "[可用的值：")));
    }
    failure.next(both(
        "`launcher --help-all` lists every flag",
        "`launcher --help-all` 会列出每个参数",
    ))
}

/// The first paragraph in Chinese. `None` for kinds of errors that the definitions of the flags cannot cause.
fn chinese(error: &clap::Error) -> Option<String> {
    let of = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => text.clone(),
        Some(ContextValue::Strings(texts)) => texts.join("、"),
        _ => String::new(),
    };
    let (flag, value) = (of(ContextKind::InvalidArg), of(ContextKind::InvalidValue));
    let why = error.source().map(reason);
    let why = why.map_or_else(String::new, |why| format!("：{why}"));
    Some(match error.kind() {
        ErrorKind::InvalidValue | ErrorKind::ValueValidation if value.is_empty() => {
            format!("'{flag}' 需要一个值{why}")
        }
        ErrorKind::InvalidValue | ErrorKind::ValueValidation => {
            format!("'{flag}' 的值 '{value}' 无效{why}")
        }
        ErrorKind::UnknownArgument | ErrorKind::InvalidSubcommand => {
            format!("没有 '{flag}' 这个参数")
        }
        ErrorKind::MissingRequiredArgument => format!("缺少必需的参数：{flag}"),
        ErrorKind::TooManyValues => format!("'{flag}' 不接受更多的值：'{value}'"),
        ErrorKind::TooFewValues | ErrorKind::WrongNumberOfValues | ErrorKind::NoEquals => {
            format!("'{flag}' 的值的个数不对")
        }
        ErrorKind::ArgumentConflict => format!("'{flag}' 重复出现，或与其他参数冲突"),
        _ => return None,
    })
}

/// Why a value is refused, in Chinese.
fn reason(error: &(dyn Error + 'static)) -> String {
    if let Some(text) = error.downcast_ref::<Text>() {
        return text.get(Lang::Zh).to_owned();
    }
    let number = error.downcast_ref().map(ParseIntError::kind);
    match number {
        Some(IntErrorKind::PosOverflow | IntErrorKind::NegOverflow) => "数字过大".to_owned(),
        Some(_) => "不是整数".to_owned(),
        None if error.is::<ParseFloatError>() => "不是数字".to_owned(),
        None => {
            let english = error.to_string();
            match english.split_once(" is not in ") {
                Some((_, range)) => format!("不在 {range} 之内"),
                None => english,
            }
        }
    }
}
