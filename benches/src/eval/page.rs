//! The report: one page that needs nothing else, readable in light and dark.

use std::fmt::Write as _;

use crab_examples::percentile::percentile;
use crab_examples::service::TurnReport;
use serde_json::{Map, Value};

use crate::figures::{self, CLASSES, all_turns, bytes, calm_turns, correct, ms, shares, slowdowns, whole_bytes};
use crate::material::RULE;
use crate::results::{Cell, Results, SessionRecord};
use crate::scheme::{self, Scheme};
use crate::svg::{Axis, Series, bars, distribution, escaped, lines, stacked};

const STYLE: &str = include_str!("page.css");

type Figures = Map<String, Value>;

/// The page.
pub(crate) fn page(results: &Results, figures: &Figures) -> String {
    let sections: [(&str, String); 9] = [
        ("1. Recovery: does the work end as without the fault?", recovery(results)),
        ("2. Slow-down by density", density(results)),
        ("3. What turns needed", classes(results)),
        ("4. How long checkpoints took, and who noticed", latency(results)),
        ("5. The inspector beside the truth", inspector(results)),
        ("6. Traffic", traffic_section(results)),
        ("7. Restores, and leaving a host", restores(results)),
        ("8. What each part is worth", ablations(results)),
        ("What it ran on, and what was run", setting(results)),
    ];
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/><title>Crab: the evaluation</title>\
         <meta name=\"viewport\" content=\"width=device-width\"/><style>{STYLE}</style></head><body>\
         <h1>Crab: the evaluation</h1>{}",
        summary(results, figures)
    );
    for (title, body) in sections {
        // Writing to a string cannot fail.
        let _ = write!(page, "<section><h2>{}</h2>{body}</section>", escaped(title));
    }
    let rows = figures.iter().map(|(name, value)| vec![name.clone(), number(value)]).collect();
    let _ = write!(
        page,
        "<section><h2>All figures</h2><details><summary>as in the JSON file</summary>{}</details></section>",
        table(&["figure", "value"], rows)
    );
    page + "</body></html>\n"
}

fn number(value: &Value) -> String {
    match value.as_f64().filter(|_| value.is_f64()) {
        Some(number) => format!("{number:.4}"),
        None => value.to_string(),
    }
}

fn percent(share: f64) -> String {
    // So that 99.9 % is not shown as all.
    if share > 0.99 && share < 1.0 { format!("{:.2} %", share * 100.0) } else { format!("{:.0} %", share * 100.0) }
}

fn size(bytes: f64) -> String {
    match bytes {
        b if b < 1e3 => format!("{b:.0} B"),
        b if b < 1e6 => format!("{:.1} kB", b / 1e3),
        b if b < 1e9 => format!("{:.1} MB", b / 1e6),
        b => format!("{:.2} GB", b / 1e9),
    }
}

fn milliseconds(value: f64) -> String {
    if value < 1.0 {
        format!("{value} ms")
    } else if value < 1e3 {
        format!("{value:.0} ms")
    } else {
        format!("{:.0} s", value / 1e3)
    }
}

fn seconds(value: f64) -> String {
    milliseconds(value * 1e3)
}

/// The first column is text, the others are numbers.
fn table(head: &[&str], rows: Vec<Vec<String>>) -> String {
    let mut table = String::from("<div class=\"wide\"><table><thead><tr>");
    for cell in head {
        let _ = write!(table, "<th>{}</th>", escaped(cell));
    }
    table.push_str("</tr></thead><tbody>");
    for row in rows {
        table.push_str("<tr>");
        for cell in row {
            // A number is not broken into two lines.
            let class = if cell.starts_with(|c: char| c.is_ascii_digit()) { " class=\"number\"" } else { "" };
            let _ = write!(table, "<td{class}>{}</td>", escaped(&cell));
        }
        table.push_str("</tr>");
    }
    table + "</tbody></table></div>"
}

/// What was not measured in this run is said, not left out.
fn missing(what: &str) -> String {
    format!("<p class=\"soft\">Not part of this run: {}.</p>", escaped(what))
}

fn paper(text: &str) -> String {
    format!("<p class=\"paper\"><b>The paper:</b> {}</p>", escaped(text))
}

fn summary(results: &Results, figures: &Figures) -> String {
    let at = |name: &str| figures.get(name).and_then(Value::as_f64);
    let mut cells = String::new();
    let mut tile = |name: &str, value: Option<String>, bound: &str| {
        if let Some(value) = value {
            let _ = write!(
                cells,
                "<div class=\"tile\"><b>{}</b><span>{}</span><small>{}</small></div>",
                escaped(&value),
                escaped(name),
                escaped(bound)
            );
        }
    };
    tile("runs with Crab that ended as the truth", at("crab_correct").map(percent), "to show: 100 %");
    tile("turns that needed no checkpoint", at("crab_skip_share").map(percent), "to show: at least 75 %");
    let times = |name: &str| at(name).map(|value| format!("{value:.3}"));
    tile("slow-down at 16, median", times("crab_overhead_p50"), "to show: at most 1.01");
    tile("slow-down at 16, 95th percentile", times("crab_overhead_p95"), "to show: at most 1.03");
    tile("slow-down at 96, median", times("crab_overhead_96_p50"), "to show: at most 1.01");
    tile(
        "traffic against full checkpoints",
        at("traffic_ratio").map(|r| format!("{:.1} %", r * 100.0)),
        "to show: at most 10 %",
    );
    tile("restore, median", at("restore_s_p50").map(|s| format!("{s:.2} s")), "to show: at most 0.4 s");
    tile("restore, 95th percentile", at("restore_s_p95").map(|s| format!("{s:.2} s")), "to show: at most 0.8 s");
    let own = results.sessions.values().filter(|session| session.own).count();
    format!(
        "<p>Recorded sessions of agents, worked through in real sandboxes: {own} that the project ships and {} of real \
         agents. Each was run without a fault first; every other run is compared with that one, by the files, the \
         answers of live processes and the conversation.{}</p><div class=\"tiles\">{cells}</div>",
        results.sessions.len() - own,
        if results.quick { " <b>This is the short form: few runs, and times that mean little.</b>" } else { "" },
    )
}

fn class_of(scheme: &str) -> &'static str {
    match scheme {
        "crab" => "crab",
        "full" => "everything",
        "chat_fs" => "files",
        "chat_only" => "chat",
        "strict" | "touched" | "in_order" => "variant",
        _ => "plain",
    }
}

fn recovery(results: &Results) -> String {
    let sessions = || results.sessions.values();
    let schemes = || scheme::ALL.iter().filter(|scheme| scheme.recovery.is_some());
    let rows: Vec<_> = schemes()
        .filter_map(|scheme| {
            let (right, all) = correct(sessions(), scheme.name);
            let share = right as f64 / all.max(1) as f64;
            let note = format!("{} ({right} of {all})", percent(share));
            (all > 0).then(|| (scheme.label.to_owned(), share, note, class_of(scheme.name)))
        })
        .collect();
    let mut html = bars("Runs that ended as the run without a fault", 1.0, &rows);
    html.push_str(
        "<p>In each run the sandbox, or Crab's own process, or both, are killed at a point that the seed gives. Without \
         any checkpoint a killed sandbox is the end: nothing is recovered. Starting over ends right, at the price of \
         all work done before.</p>",
    );
    html.push_str(&paper(
        "chat history alone recovers 8 to 13 % of the tasks, chat history and files 28 to 42 % of shell-heavy ones and \
         100 % of code repair, Crab 100 %.",
    ));
    // By what befell it.
    let mut faults: Vec<&str> =
        figures::runs(sessions(), "crab").map(|run| run.fault.as_str()).filter(|fault| !fault.is_empty()).collect();
    faults.sort_unstable();
    faults.dedup();
    let rows = faults
        .into_iter()
        .map(|fault| {
            let runs: Vec<_> = figures::runs(sessions(), "crab").filter(|run| run.fault == fault).collect();
            let right = runs.iter().filter(|run| run.differences.is_empty()).count();
            vec![fault.to_owned(), runs.len().to_string(), right.to_string()]
        })
        .collect();
    html.push_str("<h3>Crab, by what happened</h3>");
    html.push_str(&table(&["what", "runs", "ended as the truth"], rows));
    let kinds = |own: bool| sessions().filter(move |session| session.own == own);
    let rows = schemes()
        .map(|scheme| {
            let cell = |own: bool| {
                let (right, all) = correct(kinds(own), scheme.name);
                if all == 0 { String::from("-") } else { format!("{right} of {all}") }
            };
            vec![scheme.label.to_owned(), cell(true), cell(false)]
        })
        .collect();
    html.push_str("<h3>By where the sessions come from</h3>");
    html.push_str(&table(&["scheme", "shipped with the project", "recorded"], rows));
    let wrong: Vec<Vec<String>> = results
        .sessions
        .iter()
        .flat_map(|(name, session)| session.runs.iter().map(move |run| (name, run)))
        .filter(|(_, run)| run.scheme == "crab" && !run.differences.is_empty())
        .map(|(name, run)| {
            vec![name.clone(), format!("{}, turn {}", run.fault, run.response), run.differences.join("; ")]
        })
        .collect();
    if !wrong.is_empty() {
        html.push_str("<h3>Runs with Crab that did not end as the truth</h3>");
        html.push_str(&table(&["session", "what happened", "difference"], wrong));
    }
    html
}

fn density(results: &Results) -> String {
    if results.density.is_empty() {
        return missing("many sandboxes at once");
    }
    let shown: [(&Scheme, &str); 2] = [(&scheme::CRAB, "crab"), (&scheme::FULL, "everything")];
    let counts: Vec<usize> = results.density.keys().copied().collect();
    let mut series = Vec::new();
    for (scheme, class) in shown {
        for (percent, dashed) in [(50.0, false), (95.0, true)] {
            let points: Vec<(f64, f64)> = counts
                .iter()
                .enumerate()
                .filter_map(|(at, count)| {
                    let mut slower = slowdowns(&results.density[count], scheme.name);
                    (!slower.is_empty()).then(|| (at as f64, percentile(&mut slower, percent)))
                })
                .collect();
            let which = if dashed { "95th percentile" } else { "median" };
            let label = if scheme.name == "crab" { format!("Crab, {which}") } else { format!("full, {which}") };
            let class = if class == "crab" { "crab" } else { "everything" };
            series.push(Series { label, class, dashed, points });
        }
    }
    let most = series.iter().flat_map(|series| &series.points).map(|(_, y)| *y).fold(1.1, f64::max);
    let step = if most > 3.0 {
        1.0
    } else if most > 1.5 {
        0.25
    } else {
        0.05
    };
    let ticks = (0..=((most - 0.9) / step).ceil() as usize).map(|at| 0.9 + at as f64 * step);
    let ticks: Vec<(f64, String)> = if step < 0.1 {
        ticks.map(|v| (v, format!("{v:.2}"))).collect()
    } else {
        (0..=(most / step).ceil() as usize)
            .map(|at| at as f64 * step)
            .filter(|v| *v >= 0.5)
            .map(|v| (v, format!("{v:.2}")))
            .collect()
    };
    let x_axis = Axis {
        label: "sandboxes at once",
        ticks: counts.iter().enumerate().map(|(at, count)| (at as f64, count.to_string())).collect(),
        logarithmic: false,
    };
    let y_axis = Axis { label: "time, over no checkpoints", ticks, logarithmic: false };
    let mut html = lines("Slow-down by density", &x_axis, &y_axis, &series);
    html.push_str(&paper("Crab 0 to 1.9 % over a run without faults; full checkpoints at every turn up to 3.78 times as long at 96 sandboxes."));
    html.push_str(
        "<p>Each sandbox works through the first 16 responses of its session, with its model's recorded delays times the \
         scale; its time is compared with the same sandbox's time without checkpoints at the same density. One service \
         looks after all of them.</p>",
    );
    let rows = results
        .density
        .iter()
        .flat_map(|(count, cells)| {
            cells.iter().map(move |cell| {
                let mut slower = slowdowns(cells, &cell.scheme);
                let mut exposed: Vec<f64> = cell.turns.iter().map(|turn| ms(turn.exposed)).collect();
                let is_base = cell.scheme == "none" || slower.is_empty();
                let slower = |percent: f64| {
                    if is_base { "-".to_owned() } else { format!("{:.3}", percentile(&mut slower, percent)) }
                };
                density_row(*count, cell, slower, &mut exposed)
            })
        })
        .collect();
    html.push_str(&table(
        &[
            "at once",
            "scheme",
            "delays",
            "median",
            "95th",
            "exposed ms 95th",
            "machine busy",
            "Crab's CPU s each",
            "resident MB each",
            "written MB each",
            "to the device MB each",
            "failed",
        ],
        rows,
    ));
    let failures: Vec<String> =
        results.density.values().flatten().flat_map(|cell| cell.failures.iter().cloned()).take(5).collect();
    if !failures.is_empty() {
        html.push_str(&table(&["what failed"], failures.into_iter().map(|failure| vec![failure]).collect()));
    }
    html
}

fn density_row(count: usize, cell: &Cell, mut slower: impl FnMut(f64) -> String, exposed: &mut [f64]) -> Vec<String> {
    let label = scheme::ALL.iter().find(|scheme| scheme.name == cell.scheme).map_or("?", |scheme| scheme.label);
    let each = |value: f64| value / count.max(1) as f64;
    let of_crab = |value: fn(&crate::results::Usage) -> f64, digits: usize| {
        cell.crab.as_ref().map_or("-".to_owned(), |usage| format!("{:.digits$}", each(value(usage))))
    };
    vec![
        count.to_string(),
        label.to_owned(),
        format!("{}", cell.scale),
        slower(50.0),
        slower(95.0),
        if exposed.is_empty() { "-".to_owned() } else { format!("{:.0}", percentile(exposed, 95.0)) },
        percent(cell.busy),
        of_crab(|usage| usage.cpu_s, 2),
        of_crab(|usage| usage.resident_bytes as f64 / 1e6, 1),
        of_crab(|usage| usage.written_bytes as f64 / 1e6, 1),
        format!("{:.1}", each(cell.device_bytes as f64 / 1e6)),
        cell.failures.len().to_string(),
    ]
}

fn groups(results: &Results) -> Vec<(String, Vec<&SessionRecord>)> {
    let mut agents: Vec<&str> = results.sessions.values().map(|session| session.agent.as_str()).collect();
    agents.sort_unstable();
    agents.dedup();
    let of = |agent: &str| results.sessions.values().filter(|session| session.agent == agent).collect::<Vec<_>>();
    let mut groups = vec![("all".to_owned(), results.sessions.values().collect::<Vec<_>>())];
    groups.extend(agents.into_iter().map(|agent| (format!("{agent} ({})", of(agent).len()), of(agent))));
    groups
}

fn classes(results: &Results) -> String {
    let rows: Vec<(String, Vec<f64>)> = groups(results)
        .into_iter()
        .filter_map(|(name, sessions)| {
            let turns = calm_turns(sessions.into_iter(), "crab");
            (!turns.is_empty()).then(|| (name, shares(&turns).to_vec()))
        })
        .collect();
    if rows.is_empty() {
        return missing("runs with Crab in which nothing happens");
    }
    let mut html = stacked("Share of turns by what their checkpoint held", &CLASSES, &rows);
    html.push_str(
        "<p>skip: nothing had changed, and the turn rides on the version before. fs: files alone; process: processes \
         alone; full: both at one cut.</p>",
    );
    html.push_str(&paper("up to 87 % of the turns need no checkpoint, over 75 % are stateless; on code repair 25 % need one of the files and almost none a full one."));
    // Which sessions skip the least, and what their turns said had changed.
    let mut least: Vec<(f64, Vec<String>)> = results
        .sessions
        .iter()
        .filter_map(|(name, session)| {
            let turns = calm_turns(std::iter::once(session), "crab");
            if turns.is_empty() {
                return None;
            }
            let parts = shares(&turns);
            let mut row = vec![name.clone(), turns.len().to_string()];
            row.extend(parts.map(percent));
            row.push(most_common(&turns));
            Some((parts[0], row))
        })
        .collect();
    least.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (count, rows) = (least.len(), least.into_iter().map(|(_, row)| row).collect());
    let _ = write!(
        html,
        "<details><summary>{count} sessions, those with the most checkpoints first, and what had changed most often</summary>"
    );
    html.push_str(&table(&["session", "turns", "skip", "fs", "process", "full", "most often"], rows));
    html + "</details>"
}

/// Why most of the turns of these that were saved had to be.
fn most_common(turns: &[&TurnReport]) -> String {
    let mut counts: Vec<(usize, String)> = Vec::new();
    for turn in turns.iter().filter(|turn| turn.captured != "skip") {
        // What is named differs from turn to turn; the kind does not.
        let kind: String = turn.delta.split(['(', '/']).next().unwrap_or("").trim().chars().take(60).collect();
        match counts.iter_mut().find(|(_, known)| *known == kind) {
            Some((count, _)) => *count += 1,
            None => counts.push((1, kind)),
        }
    }
    counts.sort_by_key(|(count, _)| std::cmp::Reverse(*count));
    counts.first().map(|(count, kind)| format!("{kind} ({count})")).unwrap_or_default()
}

fn latency(results: &Results) -> String {
    // Where sandboxes work beside each other, as they do in earnest; else those of the sessions by themselves.
    let dense: Vec<&TurnReport> = results
        .density
        .get(&16)
        .into_iter()
        .flatten()
        .filter(|cell| cell.scheme == "crab")
        .flat_map(|cell| &cell.turns)
        .collect();
    let (turns, place) = match dense.is_empty() {
        true => (calm_turns(results.sessions.values(), "crab"), "each session by itself, with a fast model"),
        false => (dense, "16 sandboxes at once"),
    };
    if turns.is_empty() {
        return missing("turns with Crab");
    }
    let of = |class: &str, time: fn(&TurnReport) -> f64| -> Vec<f64> {
        turns.iter().filter(|turn| turn.captured == class).map(|turn| time(turn)).collect()
    };
    let whole = |turn: &TurnReport| ms(turn.hidden + turn.exposed);
    let named = CLASSES.map(|class| (class, of(class, whole)));
    let samples = named.iter().filter(|(_, values)| !values.is_empty());
    let samples = samples.map(|(class, values)| ((*class).to_owned(), *class, false, values.clone())).collect();
    let mut html =
        distribution("Time from the boundary until the turn is covered", "milliseconds", milliseconds, samples);
    let rows = CLASSES
        .into_iter()
        .filter_map(|class| {
            let cell = |time: fn(&TurnReport) -> f64, percent: f64| {
                format!("{:.1}", percentile(&mut of(class, time), percent))
            };
            let count = of(class, whole).len();
            (count > 0).then(|| {
                vec![
                    class.to_owned(),
                    count.to_string(),
                    cell(whole, 50.0),
                    cell(whole, 95.0),
                    cell(|turn| ms(turn.exposed), 50.0),
                    cell(|turn| ms(turn.exposed), 95.0),
                    cell(|turn| ms(turn.frozen), 50.0),
                    cell(|turn| ms(turn.frozen), 95.0),
                ]
            })
        })
        .collect();
    let _ = write!(
        html,
        "<p>From the turn's boundary until it is covered, {}. What is exposed is the part in which the answer was there and waited.</p>",
        escaped(place)
    );
    html.push_str(&table(
        &["class", "turns", "ms median", "ms 95th", "exposed median", "exposed 95th", "frozen median", "frozen 95th"],
        rows,
    ));
    html + &paper(
        "20 to 100 ms for files alone, 700 to 1,000 ms with processes; the inspector's own median is 54 to 72 ms, the coordinator adds 18 µs.",
    )
}

fn inspector(results: &Results) -> String {
    let Some(accuracy) = &results.accuracy else { return missing("the inspector's verdicts (cargo xtask accuracy)") };
    let cell = |name: &str| {
        accuracy.get(name).and_then(Value::as_f64).map_or("-".to_owned(), |value| format!("{:.2} %", value * 100.0))
    };
    let count =
        |name: &str| accuracy.get(name).map_or("-".to_owned(), |value| format!("{}", value.as_f64().unwrap_or(0.0)));
    let mut html = table(
        &["", "changed turns", "right", "changed though not", "not seen", "the paper"],
        vec![
            vec![
                "files".into(),
                count("fs_changed"),
                cell("fs_accuracy"),
                cell("fs_fpr"),
                cell("fs_fnr"),
                "98.3 % right, 2.3 % changed though not".into(),
            ],
            vec![
                "processes".into(),
                count("process_changed"),
                cell("process_accuracy"),
                cell("process_fpr"),
                cell("process_fnr"),
                "none not seen".into(),
            ],
        ],
    );
    let _ = write!(
        html,
        "<p>{} turns of {} sessions. The truth is told by two who share nothing with the inspector: btrfs says which files \
         differ, the kernel's trace buffer what the surviving processes did.</p>",
        count("turns"),
        count("sessions")
    );
    html
}

fn traffic_section(results: &Results) -> String {
    let sums = |sessions: &[&SessionRecord]| {
        let turns = |scheme: &'static str| calm_turns(sessions.iter().copied(), scheme);
        [whole_bytes(&turns("full")), bytes(&turns("full")), bytes(&turns("crab"))].map(|bytes| bytes as f64)
    };
    let share = |part: f64, of: f64| format!("{:.1} %", part / of * 100.0);
    let rows: Vec<Vec<String>> = groups(results)
        .into_iter()
        .filter_map(|(name, sessions)| {
            let [plain, full, crab] = sums(&sessions);
            let row = || vec![name, size(crab), size(plain), share(crab, plain), size(full), share(crab, full)];
            (plain > 0.0 && full > 0.0).then(row)
        })
        .collect();
    if rows.is_empty() {
        return missing("full checkpoints at every turn to compare with");
    }
    let [plain, full, crab] = sums(&results.sessions.values().collect::<Vec<_>>());
    let mut html = bars(
        "Bytes persisted, all sessions",
        plain,
        &[
            ("full at every turn, plain images".to_owned(), plain, size(plain), "variant"),
            ("full at every turn, in Crab's store".to_owned(), full, size(full), "everything"),
            ("Crab".to_owned(), crab, size(crab), "crab"),
        ],
    );
    let heads = ["sessions", "Crab", "full, plain images", "ratio", "full, in Crab's store", "ratio"];
    html.push_str(&table(&heads, rows));
    html.push_str(
        "<p>Crab writes process images compressed, each page once. Plain images are what CRIU makes of the same \
         processes at every turn, as systems keep them that have no such store: the first ratio is the one to put \
         beside the paper's. A full checkpoint at every turn into Crab's own store writes only the pages that changed, \
         so the second ratio shows what skipping alone saves. A snapshot of btrfs writes no file's content; what it \
         costs on the device is in the table of section 2.</p>",
    );
    html + &paper("up to 87 % less traffic than full checkpoints at every turn.")
}

fn restores(results: &Results) -> String {
    let mut all = figures::restores(results);
    if all.is_empty() {
        return missing("restores");
    }
    let mut html = distribution(
        "Time of a restore",
        "from the order until the sandbox runs",
        seconds,
        vec![("restores".to_owned(), "crab", false, all.clone())],
    );
    let mut moves: Vec<_> = figures::runs(results.sessions.values(), "crab").filter_map(|run| run.evacuation).collect();
    moves.sort_by(|a, b| a.whole_s.total_cmp(&b.whole_s));
    let mut rows = vec![vec![
        "restore on the same host".to_owned(),
        all.len().to_string(),
        format!("{:.2} s", percentile(&mut all, 50.0)),
        format!("{:.2} s", percentile(&mut all, 95.0)),
        "0.71 s, 1.00 s with the checkpoint".to_owned(),
    ]];
    if !moves.is_empty() {
        let of = |time: fn(&crate::results::Moved) -> f64| moves.iter().map(time).collect::<Vec<f64>>();
        for (name, mut times) in [
            ("notice until nothing needed is left behind", of(|moved| moved.left_s)),
            ("notice until the sandbox runs from another store", of(|moved| moved.whole_s)),
        ] {
            rows.push(vec![
                name.to_owned(),
                times.len().to_string(),
                format!("{:.2} s", percentile(&mut times, 50.0)),
                format!("{:.2} s", percentile(&mut times, 95.0)),
                "a spot notice leaves 30 s or more".to_owned(),
            ]);
        }
    }
    html.push_str(&table(&["", "times", "median", "95th", "the paper"], rows));
    if let Some(moved) = moves.get(moves.len() / 2) {
        let _ = write!(
            html,
            "<p>What is sent is the newest version whole: {} in the middle.</p>",
            size(moved.bytes as f64)
        );
    }
    html
}

fn ablations(results: &Results) -> String {
    let sessions = || results.sessions.values().filter(|session| session.own);
    let rows: Vec<Vec<String>> = [scheme::CRAB, scheme::STRICT, scheme::TOUCHED, scheme::IN_ORDER, scheme::FULL]
        .into_iter()
        .filter_map(|scheme| {
            // The same runs of each: those with the seed's crash.
            let runs =
                figures::runs(sessions(), scheme.name).filter(|run| run.fault.contains("killed") && !run.one_of_many);
            let turns: Vec<&TurnReport> = match scheme.name {
                "crab" => runs.flat_map(|run| &run.turns).collect(),
                name => all_turns(sessions(), name),
            };
            let (right, all) = correct(sessions(), scheme.name);
            let exposed = |count: usize| {
                let cells = results.density.get(&count).into_iter().flatten().filter(|cell| cell.scheme == scheme.name);
                let mut times: Vec<f64> = cells.flat_map(|cell| &cell.turns).map(|turn| ms(turn.exposed)).collect();
                if times.is_empty() { "-".to_owned() } else { format!("{:.0}", percentile(&mut times, 95.0)) }
            };
            (!turns.is_empty()).then(|| {
                vec![
                    scheme.label.to_owned(),
                    format!("{right} of {all}"),
                    percent(shares(&turns)[0]),
                    percent(shares(&turns)[2] + shares(&turns)[3]),
                    exposed(16),
                    exposed(96),
                ]
            })
        })
        .collect();
    if rows.is_empty() {
        return missing("variants of Crab");
    }
    let mut html = table(
        &["over the shipped sessions", "ended right", "skipped", "dumped processes", "exposed ms 95th at 16", "at 96"],
        rows,
    );
    html.push_str(
        "<p>Without the process rule an idle server costs a dump at every turn; without the comparison a file that was \
         made and removed, or rewritten to what it was, costs a snapshot; without the urgent queue an answer waits behind \
         checkpoints that nobody waits for.</p>",
    );
    html
}

fn setting(results: &Results) -> String {
    let mut rows: Vec<Vec<String>> =
        results.machine.iter().map(|(name, value)| vec![name.clone(), value.clone()]).collect();
    rows.push(vec!["seed".to_owned(), results.seed.to_string()]);
    rows.push(vec![
        "the model's delays, sections 1 and 3 to 8".to_owned(),
        format!("recorded, times {}", results.scale),
    ]);
    let mut html = table(&["", ""], rows);
    let _ = write!(html, "<h3>Sessions</h3><p>{}</p>", escaped(RULE));
    let _ = write!(html, "<p>{} recorded sessions have more responses and were not taken.</p>", results.not_taken);
    let rows = results
        .sessions
        .iter()
        .map(|(name, session)| {
            let crash = session.runs.iter().find(|run| run.scheme == "crab" && run.fault.contains("killed"));
            let ended = |scheme: &str| match figures::runs(std::iter::once(session), scheme)
                .find(|run| run.fault.contains("killed"))
            {
                Some(run) if run.differences.is_empty() => "same".to_owned(),
                Some(_) => "other".to_owned(),
                None => "-".to_owned(),
            };
            vec![
                name.clone(),
                session.responses.to_string(),
                crash.map_or("-".to_owned(), |run| format!("{}, turn {}", run.fault, run.response)),
                ended("crab"),
                ended("chat_fs"),
                ended("chat_only"),
            ]
        })
        .collect();
    let _ = write!(html, "<details><summary>{} sessions that were worked through</summary>", results.sessions.len());
    html.push_str(&table(&["session", "responses", "crash", "Crab", "files", "chat"], rows));
    html.push_str("</details>");
    if !results.left_out.is_empty() {
        let rows = results.left_out.iter().map(|(name, why)| vec![name.clone(), why.clone()]).collect();
        let _ = write!(html, "<details><summary>{} sessions that were left out</summary>", results.left_out.len());
        html.push_str(&table(&["session", "why"], rows));
        html.push_str("</details>");
    }
    html
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::{Moved, RunRecord, Usage};
    use std::time::Duration;

    /// Every element that is opened is closed, in order, and text holds no bare sign.
    fn well_formed(html: &str) -> Result<(), String> {
        let mut open: Vec<&str> = Vec::new();
        let body = html.strip_prefix("<!doctype html>\n").ok_or("no doctype")?;
        for (at, piece) in body.split('<').enumerate().skip(1) {
            let (tag, text) = piece.split_once('>').ok_or(format!("piece {at} has an unclosed tag: {piece}"))?;
            if tag.matches('"').count() % 2 != 0 {
                return Err(format!("a quote is open in <{tag}>"));
            }
            let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap_or("");
            if let Some(closed) = tag.strip_prefix('/') {
                match open.pop() {
                    Some(last) if last == closed => {}
                    last => return Err(format!("</{closed}> closes {last:?}")),
                }
            } else if !tag.ends_with('/') {
                open.push(name);
            }
            if open.last() != Some(&"style") && text.contains('&') {
                for entity in text.split('&').skip(1) {
                    let known = ["amp;", "lt;", "gt;", "quot;"].iter().any(|known| entity.starts_with(known));
                    if !known {
                        return Err(format!("a bare & in {text}"));
                    }
                }
            }
        }
        if open.is_empty() { Ok(()) } else { Err(format!("never closed: {open:?}")) }
    }

    fn turn(captured: &str, took: u64) -> TurnReport {
        TurnReport {
            turn: 1,
            version: 1,
            captured: captured.into(),
            delta: "files <changed> & more".into(),
            hidden: Duration::from_millis(took),
            exposed: Duration::from_millis(took / 3),
            frozen: Duration::ZERO,
            bytes: Some(took * 1000),
            size: Some(took * 10_000),
        }
    }

    fn results() -> Results {
        let run = |scheme: &str, fault: &str| RunRecord {
            scheme: scheme.into(),
            fault: fault.into(),
            response: 3,
            one_of_many: false,
            differences: if scheme == "chat_only" { vec!["/a is \"x\" & not <y>".into()] } else { Vec::new() },
            took_s: 1.0,
            restores_s: vec![0.2, 0.3],
            turns: CLASSES.iter().zip([3, 40, 90, 200]).map(|(class, took)| turn(class, took)).collect(),
            evacuation: (fault == "host left for another store").then_some(Moved {
                left_s: 1.0,
                whole_s: 2.0,
                bytes: 5,
            }),
        };
        let faults = ["", "sandbox killed in a command", "host left for another store"];
        let runs = scheme::ALL.iter().flat_map(|scheme| faults.map(|fault| run(scheme.name, fault))).collect();
        let cell = |scheme: &str, took: f64| Cell {
            scheme: scheme.into(),
            scale: 0.5,
            took_s: vec![Some(took), None],
            failures: vec!["a < b".into()],
            turns: vec![turn("full", 100)],
            wall_s: 1.0,
            busy: 0.5,
            crab: Some(Usage { cpu_s: 1.0, resident_bytes: 1, read_bytes: 1, written_bytes: 1 }),
            device_bytes: 1,
        };
        let session = SessionRecord { own: true, agent: "shipped".into(), responses: 20, runs };
        Results {
            sessions: [("a <b>".to_owned(), session)].into(),
            left_out: [("x".to_owned(), "a & b".to_owned())].into(),
            density: [
                (1, vec![cell("none", 1.0), cell("crab", 1.01)]),
                (96, vec![cell("none", 1.0), cell("full", 3.5)]),
            ]
            .into(),
            accuracy: Some(serde_json::json!({"turns": 5.0, "sessions": 1.0, "fs_accuracy": 1.0})),
            ..Results::default()
        }
    }

    #[test]
    fn the_page_is_well_formed_with_and_without_results() {
        for results in [results(), Results::default()] {
            let page = page(&results, &figures::of(&results));
            assert_eq!(well_formed(&page), Ok(()));
            assert_eq!(page.matches("<section>").count(), 10);
            assert!(!page.contains("http"), "it needs nothing from elsewhere");
            assert!(!page.contains("NaN") && !page.contains("inf"), "numbers are numbers");
        }
    }

    #[test]
    fn every_plot_is_there() {
        let results = results();
        let page = page(&results, &figures::of(&results));
        assert_eq!(page.matches("<svg ").count(), 6);
    }

    #[test]
    fn a_broken_page_would_be_noticed() {
        for bad in ["<p>", "<p></b></p>", "<p class=\"x></p>", "<p>a & b</p>"] {
            assert!(well_formed(&format!("<!doctype html>\n{bad}")).is_err(), "{bad}");
        }
    }
}
