//! HTML escaping, base64, tables and style of the page.

/// Escapes text for use between tags or in a quoted attribute.
pub(in crate::report) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            // Control characters are not allowed in HTML, whatever a model writes.
            c if c.is_control() && !matches!(c, '\n' | '\t') => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// Text of `bytes` in base64, with padding.
pub(super) fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let byte = |place: usize| u32::from(group.get(place).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for place in 0..4 {
            if place <= group.len() {
                let letter = bits >> (18 - 6 * place) & 63;
                out.push(char::from(LETTERS[letter as usize]));
            } else {
                out.push('=');
            }
        }
    }
    out
}

/// HTML table with a header row. Cells are HTML.
pub(super) fn table(head: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let mut out = String::from("<div class=\"wide\"><table>\n<thead><tr>");
    for name in head {
        out += &format!("<th>{name}</th>");
    }
    out += "</tr></thead>\n<tbody>\n";
    for row in rows {
        let cells: String = row.iter().map(|cell| format!("<td>{cell}</td>")).collect();
        out += &format!("<tr>{cells}</tr>\n");
    }
    out + "</tbody>\n</table></div>\n"
}

/// Style sheet of the page. It loads nothing from elsewhere.
pub(super) const STYLE: &str = "\
:root{color-scheme:light dark;--ground:#ffffff;--text:#1c2733;--soft:#5b6875;--line:#d9dfe5;--card:#f5f7f9;--good:#2b7a4b;--bad:#b3383f}
@media(prefers-color-scheme:dark){:root{--ground:#14191f;--text:#e4e9ee;--soft:#98a5b3;--line:#323c47;--card:#1c232b;--good:#6cc492;--bad:#f08a8f}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1240px;padding:24px 20px 48px;background:var(--ground);color:var(--text);font:15px/1.5 system-ui,sans-serif}
h1{font-size:24px;margin:0 0 2px;overflow-wrap:anywhere}
h2{font-size:18px;margin:36px 0 10px}
h3{font-size:14px;margin:0 0 6px;font-weight:600}
p{margin:4px 0}
.soft{color:var(--soft)}
.good{color:var(--good)}
.bad{color:var(--bad)}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:16px}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,280px),1fr));gap:14px}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 14px;min-width:0}
.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(130px,1fr));gap:10px;margin-top:14px}
.facts div{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:8px 12px}
.facts b{display:block;font-size:18px;font-weight:600}
svg{display:block;width:100%;height:auto}
img{display:inline-block;max-width:100%;max-height:160px;border-radius:4px;margin:0 6px 6px 0;vertical-align:top;background:#fff}
.missing{display:inline-block;border:1px dashed var(--line);border-radius:4px;padding:18px 10px;margin:0 6px 6px 0;font-size:12px;overflow-wrap:anywhere}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums}
th,td{text-align:left;white-space:nowrap;padding:3px 16px 3px 0;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600;color:var(--soft)}
td code{white-space:pre-wrap;overflow-wrap:anywhere}
dl{margin:0;display:grid;grid-template-columns:auto 1fr;gap:2px 10px;font-size:14px}
dt{color:var(--soft)}
dd{margin:0;overflow-wrap:anywhere;white-space:pre-wrap}
details summary{cursor:pointer;margin:8px 0}
.failure{border-left:4px solid var(--bad)}
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_is_escaped() {
        assert_eq!(
            escape("<script>alert('x' & \"y\")</script>\u{7}\n"),
            "&lt;script&gt;alert(&#39;x&#39; &amp; &quot;y&quot;)&lt;/script&gt;\u{fffd}\n"
        );
    }

    #[test]
    fn base64_matches_known_texts() {
        for (text, code) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(text.as_bytes()), code);
        }
        assert_eq!(base64(&[0xff, 0xee, 0xdd, 0xfb]), "/+7d+w==");
    }
}
