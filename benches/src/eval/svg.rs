//! Plots as SVG that takes its colours from the page, so that both colour schemes can be read.

use std::fmt::Write as _;

const WIDTH: f64 = 720.0;
const LEFT: f64 = 260.0;
const RIGHT: f64 = 60.0;

pub(crate) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn open(height: f64, title: &str) -> String {
    format!("<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{0}\"><title>{0}</title>", escaped(title))
}

fn text(svg: &mut String, x: f64, y: f64, anchor: &str, class: &str, words: &str) {
    // Writing to a string cannot fail.
    let _ = write!(
        svg,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" class=\"{class}\">{}</text>",
        escaped(words)
    );
}

fn line(svg: &mut String, from: (f64, f64), to: (f64, f64), class: &str) {
    let _ = write!(
        svg,
        "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" class=\"{class}\"/>",
        from.0, from.1, to.0, to.1
    );
}

fn rect(svg: &mut String, x: f64, y: f64, width: f64, height: f64, class: &str) {
    let _ = write!(
        svg,
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{height:.1}\" class=\"{class}\"/>",
        width.max(0.0)
    );
}

/// One bar a row, each a share of `most`, with what is written behind it.
pub(crate) fn bars(title: &str, most: f64, rows: &[(String, f64, String, &str)]) -> String {
    let mut svg = open(rows.len() as f64 * 26.0 + 4.0, title);
    for (at, (label, value, note, class)) in rows.iter().enumerate() {
        let y = at as f64 * 26.0;
        let width = (WIDTH - LEFT - 150.0) * (value / most.max(f64::MIN_POSITIVE)).clamp(0.0, 1.0);
        text(&mut svg, LEFT - 10.0, y + 18.0, "end", "", label);
        rect(&mut svg, LEFT, y + 5.0, width.max(1.0), 17.0, &format!("fill-{class}"));
        text(&mut svg, LEFT + width.max(1.0) + 8.0, y + 18.0, "start", "", note);
    }
    svg + "</svg>"
}

/// One bar a row, all of the same length, divided in parts.
pub(crate) fn stacked(title: &str, parts: &[&str], rows: &[(String, Vec<f64>)]) -> String {
    let mut svg = open(rows.len() as f64 * 28.0 + 30.0, title);
    let width = WIDTH - LEFT - 20.0;
    for (at, (label, shares)) in rows.iter().enumerate() {
        let y = at as f64 * 28.0;
        text(&mut svg, LEFT - 10.0, y + 18.0, "end", "", label);
        let mut x = LEFT;
        for (part, share) in parts.iter().zip(shares) {
            rect(&mut svg, x, y + 4.0, share * width, 19.0, &format!("fill-{part}"));
            if *share > 0.07 {
                let words = format!("{:.0} %", share * 100.0);
                text(&mut svg, x + share * width / 2.0, y + 18.0, "middle", &format!("on-{part}"), &words);
            }
            x += share * width;
        }
    }
    let y = rows.len() as f64 * 28.0 + 20.0;
    let mut x = LEFT;
    for part in parts {
        rect(&mut svg, x, y - 10.0, 11.0, 11.0, &format!("fill-{part}"));
        text(&mut svg, x + 16.0, y, "start", "", part);
        x += 110.0;
    }
    svg + "</svg>"
}

/// A line of a plot.
pub(crate) struct Series {
    pub(crate) label: String,
    pub(crate) class: &'static str,
    /// A second line of the same colour.
    pub(crate) dashed: bool,
    pub(crate) points: Vec<(f64, f64)>,
}

/// What an axis shows.
pub(crate) struct Axis {
    pub(crate) label: &'static str,
    /// Values and what is written there; the first and the last are the ends.
    pub(crate) ticks: Vec<(f64, String)>,
    pub(crate) logarithmic: bool,
}

impl Axis {
    fn place(&self, value: f64) -> f64 {
        let scale = |value: f64| if self.logarithmic { value.max(1e-9).log10() } else { value };
        let (first, last) = (self.ticks.first().map_or(0.0, |t| t.0), self.ticks.last().map_or(1.0, |t| t.0));
        ((scale(value) - scale(first)) / (scale(last) - scale(first)).max(f64::MIN_POSITIVE)).clamp(0.0, 1.0)
    }

    /// Powers of ten, from below the least to above the greatest.
    pub(crate) fn decades(label: &'static str, values: impl Iterator<Item = f64>, written: fn(f64) -> String) -> Self {
        let (least, most) =
            values.filter(|value| *value > 0.0).fold((f64::MAX, f64::MIN), |(a, b), v| (a.min(v), b.max(v)));
        let (first, last) =
            if least > most { (0, 1) } else { (least.log10().floor() as i32, most.log10().ceil() as i32) };
        let ticks = (first..=last.max(first + 1)).map(|power| 10_f64.powi(power)).map(|v| (v, written(v))).collect();
        Self { label, ticks, logarithmic: true }
    }
}

/// Lines over a grid, with their names at the right of a row above.
pub(crate) fn lines(title: &str, x_axis: &Axis, y_axis: &Axis, series: &[Series]) -> String {
    let (left, top, bottom, height) = (70.0, 16.0 + 20.0 * series.len().div_ceil(2) as f64, 50.0, 250.0);
    let whole = top + height + bottom;
    let mut svg = open(whole, title);
    let x = |value: f64| left + x_axis.place(value) * (WIDTH - left - RIGHT);
    let y = |value: f64| top + (1.0 - y_axis.place(value)) * height;
    for (value, words) in &x_axis.ticks {
        line(&mut svg, (x(*value), top), (x(*value), top + height), "grid");
        text(&mut svg, x(*value), top + height + 18.0, "middle", "soft", words);
    }
    for (value, words) in &y_axis.ticks {
        line(&mut svg, (left, y(*value)), (WIDTH - RIGHT, y(*value)), "grid");
        text(&mut svg, left - 8.0, y(*value) + 4.0, "end", "soft", words);
    }
    text(&mut svg, (left + WIDTH - RIGHT) / 2.0, whole - 10.0, "middle", "soft", x_axis.label);
    text(&mut svg, left, top - 8.0, "start", "soft", y_axis.label);
    for (at, one) in series.iter().enumerate() {
        let dash = if one.dashed { " dashed" } else { "" };
        let class = format!("stroke-{}{dash}", one.class);
        let points: Vec<String> = one.points.iter().map(|(a, b)| format!("{:.1},{:.1}", x(*a), y(*b))).collect();
        let _ = write!(svg, "<polyline points=\"{}\" class=\"{class}\"/>", points.join(" "));
        let (column, row) = ((at % 2) as f64, (at / 2) as f64);
        let (from, place) = (left + 170.0 + column * 260.0, 14.0 + row * 20.0);
        line(&mut svg, (from, place - 4.0), (from + 26.0, place - 4.0), &class);
        text(&mut svg, from + 33.0, place, "start", "", &one.label);
    }
    svg + "</svg>"
}

/// How many of the samples lie at or below each value: one line a series.
pub(crate) fn distribution(
    title: &str,
    unit: &'static str,
    written: fn(f64) -> String,
    samples: Vec<(String, &'static str, bool, Vec<f64>)>,
) -> String {
    let axis = Axis::decades(unit, samples.iter().flat_map(|(.., values)| values.iter().copied()), written);
    let shares = [0.0, 0.25, 0.5, 0.75, 1.0].map(|share| (share, format!("{:.0} %", share * 100.0)));
    let y_axis = Axis { label: "at most", ticks: shares.into(), logarithmic: false };
    let series: Vec<Series> = samples
        .into_iter()
        .map(|(label, class, dashed, mut values)| {
            values.sort_by(f64::total_cmp);
            let count = values.len().max(1) as f64;
            let points = values.iter().enumerate().map(|(at, value)| (*value, (at + 1) as f64 / count)).collect();
            Series { label, class, dashed, points }
        })
        .collect();
    lines(title, &axis, &y_axis, &series)
}
