//! Line and area charts as SVG, for pages and as separate files.
//!
//! Text and grid have the color of the surrounding text. Series have colors that are visible on light and dark
//! backgrounds. Charts refer to no other file.

use super::page::escape;
use std::fmt::Write;

use super::axis::Axis;

/// Width of a chart in a page. It is small, so its text stays readable on a phone.
pub(super) const WIDTH: f64 = 480.0;
const HEIGHT: f64 = 270.0;
const LEFT: f64 = 54.0;
const RIGHT: f64 = 12.0;
const BOTTOM: f64 = 34.0;
/// Height of one line of the legend.
const LEGEND_LINE: f64 = 16.0;
/// Maximum points drawn per line; more would not be visible.
const MOST_POINTS: usize = 1000;

/// Colors of series, in order. They repeat after the last.
const COLOURS: [&str; 8] = [
    "#4c86c6", "#e08a2e", "#3f9e6e", "#d1545b", "#9467bd", "#2f9fb0", "#b8952a", "#c65d9b",
];

/// CSS color of series `index`. Colors repeat after the last one.
pub(super) fn colour(index: usize) -> &'static str {
    COLOURS[index % COLOURS.len()]
}

/// Style in which a line of a chart is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Look {
    Faint,
    Plain,
    Strong,
    Dashed,
}

/// Line through the points (x, y), from left to right.
#[derive(Debug, Clone)]
pub(super) struct Line {
    pub(super) name: String,
    pub(super) colour: usize,
    pub(super) look: Look,
    pub(super) points: Vec<(f64, f64)>,
}

/// Layer of a stacked area chart, with one value at every point of [`Chart::at`].
#[derive(Debug, Clone)]
pub(super) struct Layer {
    pub(super) name: String,
    pub(super) colour: usize,
    pub(super) values: Vec<f64>,
}

/// Content of a chart: stacked areas, with lines over them.
#[derive(Debug, Clone, Default)]
pub(super) struct Chart {
    /// Unit of the values, shown at the axis.
    pub(super) unit: String,
    /// Horizontal positions of the layers' values.
    pub(super) at: Vec<f64>,
    /// Layers of the stacked areas, from the bottom up.
    pub(super) layers: Vec<Layer>,
    /// Lines of the chart, drawn over the layers.
    pub(super) lines: Vec<Line>,
}

impl Chart {
    /// Whether the chart has no data.
    pub(super) fn is_empty(&self) -> bool {
        self.at.is_empty() && self.lines.iter().all(|line| line.points.is_empty())
    }

    /// The chart as an `<svg>` element. `label` describes it for screen readers.
    pub(super) fn to_svg(&self, label: &str) -> String {
        let mut svg = open(label, HEIGHT);
        svg += &self.drawing();
        svg += "</svg>\n";
        svg
    }

    /// SVG elements of the chart, to be put inside an `<svg>` element.
    pub(super) fn drawing(&self) -> String {
        let mut svg = String::new();
        let names = self.layers.iter().map(|l| (&*l.name, l.colour));
        let names = names.chain(self.lines.iter().map(|l| (&*l.name, l.colour)));
        let top = legend(&mut svg, names.filter(|(name, _)| !name.is_empty()));
        let Some(frame) = Frame::around(self, top) else {
            push(
                &mut svg,
                format_args!(
                    "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">nothing yet</text>\n",
                    WIDTH / 2.0,
                    HEIGHT / 2.0
                ),
            );
            return svg;
        };
        frame.draw_axes(&mut svg, &self.unit);
        self.draw_layers(&mut svg, &frame);
        for line in &self.lines {
            frame.draw_line(&mut svg, line);
        }
        svg
    }

    /// Cumulative height of the layers at every point, bottom layer first, preceded by the zero line.
    fn stack(&self) -> Vec<Vec<f64>> {
        let mut tops = vec![vec![0.0; self.at.len()]];
        for layer in &self.layers {
            let below = &tops[tops.len() - 1];
            let top = below
                .iter()
                .zip(&layer.values)
                .map(|(low, value)| low + value);
            tops.push(top.collect());
        }
        tops
    }

    fn draw_layers(&self, svg: &mut String, frame: &Frame) {
        let tops = self.stack();
        let thin = self.at.len().div_ceil(MOST_POINTS).max(1);
        // A single point is drawn as an area of width 1.
        let places: Vec<(usize, f64)> = match &self.at[..] {
            [only] => vec![(0, only - 0.5), (0, only + 0.5)],
            at => (0..at.len()).step_by(thin).map(|i| (i, at[i])).collect(),
        };
        for (layer, edges) in self.layers.iter().zip(tops.windows(2)) {
            let there = places.iter().map(|(i, x)| frame.place(*x, edges[1][*i]));
            let back = places
                .iter()
                .rev()
                .map(|(i, x)| frame.place(*x, edges[0][*i]));
            let path: Vec<String> = there.chain(back).collect();
            push(
                svg,
                format_args!(
                    "<polygon points=\"{}\" fill=\"{}\" fill-opacity=\"0.75\"/>\n",
                    path.join(" "),
                    colour(layer.colour)
                ),
            );
        }
    }
}

/// Opening tag of an `<svg>` element in a page.
pub(super) fn open(label: &str, height: f64) -> String {
    format!(
        "<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{label}\" font-family=\"system-ui, sans-serif\" font-size=\"12\" fill=\"currentColor\">\n"
    )
}

/// Draws names with their colors, in as many lines as needed. Returns the vertical position after the legend.
pub(super) fn legend<'n>(svg: &mut String, names: impl Iterator<Item = (&'n str, usize)>) -> f64 {
    let (mut x, mut y) = (LEFT, 13.0);
    for (name, index) in names {
        let width = 26.0 + 6.6 * name.chars().count() as f64;
        if x + width > WIDTH && x > LEFT {
            x = LEFT;
            y += LEGEND_LINE;
        }
        push(
            svg,
            format_args!(
                "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"11\" height=\"11\" rx=\"2\" fill=\"{}\"/>\n<text x=\"{:.1}\" y=\"{y:.1}\">{}</text>\n",
                y - 10.0,
                colour(index),
                x + 15.0,
                escape(name)
            ),
        );
        x += width;
    }
    y + 14.0
}

/// Plot area: its axes and its vertical position.
struct Frame {
    x: Axis,
    y: Axis,
    top: f64,
}

impl Frame {
    fn around(chart: &Chart, top: f64) -> Option<Self> {
        let lines = || chart.lines.iter().flat_map(|line| &line.points);
        let stack = chart.stack();
        let tops = stack.last().into_iter().flatten();
        let finite = |value: &f64| value.is_finite();
        let xs = lines().map(|p| p.0).chain(chart.at.iter().copied());
        let (first, last) = range(xs.filter(finite))?;
        let (low, high) = range(lines().map(|p| p.1).chain(tops.copied()).filter(finite))?;
        // The axis includes zero unless that would flatten the curve. Stacked layers always start at zero.
        let low = if !chart.layers.is_empty() || (low > 0.0 && low < 0.6 * high) {
            0.0
        } else {
            low
        };
        let first = if first < 0.25 * last { 0.0 } else { first };
        Some(Self {
            x: Axis::nice(first, last, 6.0, true),
            y: Axis::nice(low, high, 5.0, false),
            top,
        })
    }

    fn at(&self, x: f64, y: f64) -> (f64, f64) {
        (
            LEFT + self.x.share(x).clamp(0.0, 1.0) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - self.y.share(y) * (HEIGHT - self.top - BOTTOM),
        )
    }

    fn place(&self, x: f64, y: f64) -> String {
        let (x, y) = self.at(x, y);
        format!("{x:.1},{y:.1}")
    }

    fn draw_axes(&self, svg: &mut String, unit: &str) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for value in self.y.marks() {
            let (_, y) = self.at(0.0, value);
            push(
                svg,
                format_args!(
                    "<line x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"currentColor\" stroke-opacity=\"0.15\"/>\n<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\" fill-opacity=\"0.75\">{}</text>\n",
                    LEFT - 6.0,
                    y + 4.0,
                    mark(value, self.y.digits())
                ),
            );
        }
        for value in self.x.marks() {
            let (x, _) = self.at(value, 0.0);
            push(
                svg,
                format_args!(
                    "<text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\" fill-opacity=\"0.75\">{value:.0}</text>\n",
                    bottom + 15.0
                ),
            );
        }
        push(
            svg,
            format_args!(
                "<path d=\"M{LEFT} {bottom}H{right}\" fill=\"none\" stroke=\"currentColor\" stroke-opacity=\"0.5\"/>\n<text x=\"{}\" y=\"{}\" text-anchor=\"middle\" fill-opacity=\"0.75\">step</text>\n",
                (LEFT + right) / 2.0,
                HEIGHT - 4.0
            ),
        );
        if !unit.is_empty() {
            push(
                svg,
                format_args!(
                    "<text x=\"4\" y=\"{}\" fill-opacity=\"0.75\">{}</text>\n",
                    HEIGHT - 4.0,
                    escape(unit)
                ),
            );
        }
    }

    fn draw_line(&self, svg: &mut String, line: &Line) {
        let thin = line.points.len().div_ceil(MOST_POINTS).max(1);
        let finite = line
            .points
            .iter()
            .filter(|(x, y)| x.is_finite() && y.is_finite());
        let places: Vec<(f64, f64)> = finite.step_by(thin).map(|(x, y)| self.at(*x, *y)).collect();
        let (width, opacity, dash) = match line.look {
            Look::Faint => (1.0, 0.4, ""),
            Look::Plain => (1.5, 1.0, ""),
            Look::Strong => (2.2, 1.0, ""),
            Look::Dashed => (1.5, 1.0, " stroke-dasharray=\"6 4\""),
        };
        let colour = colour(line.colour);
        if let [(x, y)] = places[..] {
            push(
                svg,
                format_args!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>\n"),
            );
            return;
        }
        let path: Vec<String> = places
            .iter()
            .map(|(x, y)| format!("{x:.1},{y:.1}"))
            .collect();
        push(
            svg,
            format_args!(
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\" stroke-opacity=\"{opacity}\" stroke-linejoin=\"round\"{dash}/>\n",
                path.join(" ")
            ),
        );
    }
}

fn range(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.fold(None, |range: Option<(f64, f64)>, value| {
        Some(range.map_or((value, value), |(low, high)| {
            (low.min(value), high.max(value))
        }))
    })
}

/// Label of a mark. Very small numbers such as learning rates are in scientific notation.
fn mark(value: f64, digits: usize) -> String {
    if value == 0.0 {
        "0".to_owned()
    } else if digits > 3 {
        format!("{value:.1e}")
    } else {
        format!("{value:.digits$}")
    }
}

pub(super) fn push(svg: &mut String, text: std::fmt::Arguments<'_>) {
    svg.write_fmt(text)
        .expect("writing into a string cannot fail");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(points: &[(f64, f64)]) -> Line {
        Line {
            name: "loss".into(),
            colour: 0,
            look: Look::Plain,
            points: points.to_vec(),
        }
    }

    fn polygon(svg: &str, index: usize) -> Vec<(f64, f64)> {
        let text = svg
            .split("<polygon points=\"")
            .nth(index + 1)
            .expect("an area");
        let points = text.split('"').next().expect("its points").split(' ');
        let pair = |p: &str| {
            p.split_once(',')
                .map(|(x, y)| (x.parse().ok(), y.parse().ok()))
        };
        points
            .filter_map(pair)
            .filter_map(|(x, y)| Some((x?, y?)))
            .collect()
    }

    #[test]
    fn layers_of_a_chart_are_stacked() {
        let layer = |values: &[f64]| Layer {
            name: String::new(),
            colour: 0,
            values: values.to_vec(),
        };
        let chart = Chart {
            at: vec![1.0, 2.0, 3.0],
            layers: vec![layer(&[1.0, 1.0, 1.0]), layer(&[1.0, 2.0, 3.0])],
            ..Chart::default()
        };
        let svg = chart.to_svg("memory");
        let (low, high) = (polygon(&svg, 0), polygon(&svg, 1));
        assert_eq!(low.len(), 6);
        // The upper layer's lower edge, drawn backwards, is the lower layer's upper edge.
        let back: Vec<_> = high[3..].iter().rev().copied().collect();
        assert_eq!(low[..3], back[..]);
        assert!(high[0].1 > high[1].1 && high[1].1 > high[2].1, "{high:?}");
    }

    #[test]
    fn one_step_constant_values_and_none_can_be_drawn() {
        for points in [vec![(1.0, 2.0)], vec![(1.0, 0.0), (2.0, 0.0)], vec![]] {
            let chart = Chart {
                lines: vec![line(&points)],
                ..Chart::default()
            };
            let svg = chart.to_svg("loss");
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
            assert_eq!(chart.is_empty(), points.is_empty());
            assert_eq!(svg.contains("nothing yet"), points.is_empty());
        }
        let single = Chart {
            at: vec![5.0],
            layers: vec![Layer {
                name: "a".into(),
                colour: 1,
                values: vec![1.0],
            }],
            ..Chart::default()
        };
        let points = polygon(&single.to_svg("x"), 0);
        assert!(
            points[1].0 >= points[0].0 && points.len() == 4,
            "{points:?}"
        );
    }

    #[test]
    fn values_that_are_not_finite_are_left_out() {
        let chart = Chart {
            lines: vec![line(&[(1.0, 1.0), (2.0, f64::NAN), (3.0, 0.5)])],
            ..Chart::default()
        };
        let svg = chart.to_svg("loss");
        let points = svg.split("<polyline points=\"").nth(1).expect("a line");
        assert_eq!(
            points.split('"').next().map(|p| p.matches(',').count()),
            Some(2)
        );
    }

    #[test]
    fn small_numbers_are_written_short() {
        assert_eq!(mark(0.00002, 5), "2.0e-5");
        assert_eq!((mark(0.0, 5), mark(1.5, 1)), ("0".into(), "1.5".into()));
    }
}
