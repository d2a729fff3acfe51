//! Charts that compare several runs, one below the other in one SVG document.

use super::chart::{Chart, Line, Look, WIDTH, push};
use super::page::escape;

/// Height of one chart with its title, in units of the SVG.
const PANEL_HEIGHT: f64 = 300.0;

/// Named line of a chart, through (step, value) points.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    /// Name of the line, shown in the legend of the chart.
    pub name: String,
    /// Points of the line as (step, value), in the order of their steps.
    pub points: Vec<(f64, f64)>,
}

/// One chart of a comparison of runs: a title, and lines whose values have the same unit.
#[derive(Debug, Clone, PartialEq)]
pub struct Panel {
    /// Title shown above the chart.
    pub title: String,
    /// Unit of the values, shown at the axis.
    pub unit: String,
    /// Lines drawn in the chart.
    pub series: Vec<Series>,
}

/// SVG document with the given charts, one below the other.
pub fn comparison(panels: &[Panel]) -> String {
    let height = PANEL_HEIGHT * panels.len() as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" color=\"#333\" font-family=\"sans-serif\" font-size=\"12\" fill=\"#333\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for (panel, top) in panels
        .iter()
        .zip((0..).map(|i| f64::from(i) * PANEL_HEIGHT))
    {
        let lines = panel
            .series
            .iter()
            .enumerate()
            .map(|(colour, series)| Line {
                name: series.name.clone(),
                colour,
                look: Look::Plain,
                points: series.points.clone(),
            });
        let chart = Chart {
            unit: panel.unit.clone(),
            lines: lines.collect(),
            ..Chart::default()
        };
        push(
            &mut svg,
            format_args!(
                "<text x=\"12\" y=\"{}\" font-size=\"14\">{}</text>\n<g transform=\"translate(0 {})\">\n{}</g>\n",
                top + 18.0,
                escape(&panel.title),
                top + 26.0,
                chart.drawing()
            ),
        );
    }
    svg += "</svg>\n";
    svg
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_panel_has_its_title_and_its_lines() {
        let series = |name: &str| Series {
            name: name.into(),
            points: vec![(1.0, 2.0), (2.0, 1.0)],
        };
        let panel = |title: &str| Panel {
            title: title.into(),
            unit: "loss".into(),
            series: vec![series("one"), series("two")],
        };
        let svg = comparison(&[panel("first"), panel("second")]);
        assert_eq!(svg.matches("<polyline").count(), 4);
        for word in [">first<", ">second<", ">one<", ">two<"] {
            assert!(svg.contains(word), "{word}");
        }
    }

    #[test]
    fn names_are_text_whatever_they_contain() {
        let hostile = "<b>&".to_owned();
        let panel = Panel {
            title: hostile.clone(),
            unit: hostile.clone(),
            series: vec![Series {
                name: hostile,
                points: vec![(1.0, 2.0), (2.0, 1.0)],
            }],
        };
        let svg = comparison(&[panel]);
        assert!(!svg.contains("<b>"), "{svg}");
        assert_eq!(svg.matches("&lt;b&gt;&amp;").count(), 3, "{svg}");
    }
}
