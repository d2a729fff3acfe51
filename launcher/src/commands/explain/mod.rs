//! `launcher explain`: a page for every error code, in English and Chinese.

mod errors;

use std::process::ExitCode;

use crate::cli::ExplainArgs;
use crate::error::output::print;
use crate::error::pages::{Page, page};
use crate::error::{ErrorCode, Failure};
use crate::lang::{Lang, both, columns, is_wide, text};

pub use errors::errors_page;

/// Width of a page's text in columns.
const WIDTH: usize = 96;

/// Prints the page that `args` asks for, or the list of codes, on standard output.
///
/// # Errors
/// No code has the given name (exit 2).
pub(crate) fn run(args: &ExplainArgs) -> Result<ExitCode, Failure> {
    let lang = args.lang.unwrap_or_else(Lang::chosen);
    let text = match &args.code {
        None => list(lang),
        Some(word) => render(find(word)?, lang),
    };
    print(&text)
}

/// The error code that `word` means: `E05`, `e5`, `5`, `error[E05]`.
fn find(word: &str) -> Result<ErrorCode, Failure> {
    let bare = word.trim().to_ascii_uppercase();
    let bare = bare
        .trim_start_matches("ERROR")
        .trim_start_matches("错误")
        .trim_matches(['[', ']']);
    let number: Option<u32> = bare.trim_start_matches('E').parse().ok();
    let number_of = |code: ErrorCode| code.as_str()[1..].parse::<u32>().ok();
    if let Some(code) = ErrorCode::ALL
        .into_iter()
        .find(|code| number.is_some() && number_of(*code) == number)
    {
        return Ok(code);
    }
    let distance = |code: ErrorCode| match (number, number_of(code)) {
        (Some(asked), Some(own)) => asked.abs_diff(own),
        _ => u32::MAX,
    };
    let nearest = ErrorCode::ALL
        .into_iter()
        .min_by_key(|code| distance(*code))
        .filter(|_| number.is_some());
    let failure = Failure::usage(
        text!(
            "no error has the code '{word}'",
            "没有代码为 '{word}' 的错误"
        ),
        both(
            "codes are E and two digits, as printed in error[E05]",
            "代码由 E 和两位数字组成，如输出中的 错误[E05]",
        ),
    );
    let list = both(
        "`launcher explain` lists every code",
        "`launcher explain` 会列出所有代码",
    );
    Err(match nearest {
        Some(code) => failure
            .next(text!(
                "did you mean `launcher explain {code}`?",
                "您是否想用 `launcher explain {code}`？"
            ))
            .next(list),
        None => failure.next(list),
    })
}

fn list(lang: Lang) -> String {
    let mut text = match lang {
        Lang::En => " code  exit  meaning\n".to_string(),
        Lang::Zh => " 代码  退出码  含义\n".to_string(),
    };
    for code in ErrorCode::ALL {
        let title = page(code).title.get(lang);
        text += &format!(" {code}   {:>4}  {title}\n", code.status());
    }
    text + match lang {
        Lang::En => "\n `launcher explain E05` shows the page of one code; --lang zh in Chinese\n",
        Lang::Zh => "\n `launcher explain E05 --lang zh` 显示某个代码的说明\n",
    }
}

fn render(code: ErrorCode, lang: Lang) -> String {
    let Page {
        title,
        meaning,
        causes,
        look_at,
        what_to_do,
        example,
    } = page(code);
    let status = code.status();
    let headings = match lang {
        Lang::En => ["usual causes", "what to look at", "what to do", "example"],
        Lang::Zh => ["常见原因", "查看什么", "怎么办", "示例"],
    };
    let exit = match lang {
        Lang::En => "exit code",
        Lang::Zh => "退出码",
    };
    let mut text = format!("{code}  {}  ({exit} {status})\n\n", title.get(lang));
    text += &wrapped(meaning.get(lang), "  ", "  ");
    for (heading, items) in headings.iter().zip([causes, look_at, what_to_do]) {
        text += &format!("\n{heading}\n");
        for item in items.iter() {
            text += &wrapped(item.get(lang), "  - ", "    ");
        }
    }
    text += &format!("\n{}\n", headings[3]);
    for line in example.lines() {
        text += &format!("  {line}\n");
    }
    text
}

/// Wraps `text` to lines of at most [`WIDTH`] columns. The first line begins with `first`, the others with `rest`. A
/// Chinese character takes two columns, and a line may break after each.
fn wrapped(text: &str, first: &str, rest: &str) -> String {
    let mut out = first.to_string();
    let mut used = first.len();
    for word in pieces(text) {
        if used + columns(word.trim_end()) > WIDTH {
            out.truncate(out.trim_end_matches(' ').len());
            out += &format!("\n{rest}");
            used = rest.len();
        }
        out += word;
        used += columns(word);
    }
    out.truncate(out.trim_end().len());
    out + "\n"
}

/// Pieces between which a line may break: after spaces, and after wide characters without following punctuation.
fn pieces(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut start = 0;
    let mut letters = text.char_indices().peekable();
    while let Some((at, letter)) = letters.next() {
        let next = letters.peek().map(|(_, letter)| *letter);
        let closes = next.is_some_and(|next| "，。；：、）？！」”".contains(next));
        if letter == ' ' || (is_wide(letter) && !closes) {
            let end = at + letter.len_utf8();
            found.push(&text[start..end]);
            start = end;
        }
    }
    found.push(&text[start..]);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_both_languages_and_its_own_example() {
        for code in ErrorCode::ALL {
            let page = page(code);
            let lists = [page.causes, page.look_at, page.what_to_do];
            assert!(lists.iter().all(|list| !list.is_empty()), "{code}");
            let parts = [&page.title, &page.meaning]
                .into_iter()
                .chain(lists.into_iter().flatten());
            for part in parts {
                assert!(
                    !part.en.is_empty() && part.en.is_ascii(),
                    "{code}: {}",
                    part.en
                );
                let chinese = part.zh.chars().filter(|letter| is_wide(*letter)).count();
                assert!(chinese >= 2, "{code}: {}", part.zh);
            }
            let start = format!("error[{code}] ");
            let end = format!("  exit {}", code.status());
            assert!(page.example.starts_with(&start), "{code}");
            assert!(page.example.contains(&end), "{code}");
            for lang in [Lang::En, Lang::Zh] {
                let text = render(code, lang);
                assert!(text.starts_with(code.as_str()), "{text}");
                assert!(list(lang).contains(page.title.get(lang)), "{code}");
            }
        }
    }

    #[test]
    fn codes_are_found_however_they_are_written() {
        for word in [
            "E05",
            "e05",
            "5",
            "e5",
            "error[E05]",
            "错误[E05]",
            "[E05]",
            "05",
        ] {
            assert_eq!(find(word), Ok(ErrorCode::Numeric), "{word}");
        }
        let failure = find("E23").expect_err("unknown");
        assert!(
            failure.next[0].contains("launcher explain E22"),
            "{failure}"
        );
        let failure = find("nonsense").expect_err("unknown");
        assert_eq!(failure.next, ["`launcher explain` lists every code"]);
    }

    #[test]
    fn lines_break_at_spaces_and_between_chinese_characters() {
        let english = wrapped(&"word ".repeat(40), "  - ", "    ");
        assert!(english.lines().all(|line| line.len() <= WIDTH), "{english}");
        assert_eq!(english.matches("word").count(), 40);
        let chinese = wrapped(&"内存不足，".repeat(20), "  ", "  ");
        assert!(chinese.lines().count() > 1);
        assert!(chinese.lines().all(|line| !line.trim().starts_with('，')));
    }
}
