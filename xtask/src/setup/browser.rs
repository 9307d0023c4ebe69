//! A browser, for the test that opens the evaluation's page: `setup --browser`.

use super::{Found, Home, Report, packages};
use crate::command;

/// The program and its package.
const BROWSER: &str = "chromium-headless-shell";

pub(super) fn look(_: &Home) -> Result<Found, String> {
    let what = format!("the browser {BROWSER}");
    Ok(match command::find(BROWSER) {
        Some(_) => Found::Ready(what),
        None => Found::Absent(format!("{what} (65 MB)")),
    })
}

pub(super) fn make(_: &Home, report: &Report) -> Result<(), String> {
    packages::install(&[BROWSER], report)
}
