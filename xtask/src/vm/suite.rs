//! Which tests run in the virtual machine, and what became of them.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::boot;
use super::image::{Image, remove};
use crate::tasks;

/// The test programs that run in the guest: of each package, and the words of which one must be in a test's name, where
/// there are any. `CRAB_IN_VM` tells tests that they run there. What needs nothing of the guest's is left to the host.
const SUITES: &[(&str, &[&str], &[&str])] = &[
    ("crab-backend-zfs", &["lib"], &["restore_cut_short", "sys::", "transfer::"]),
    ("crab-backend-zfs", &["conforms", "imports", "limits", "model", "sandboxes", "stress"], &[]),
    ("crab-backend-btrfs", &["conforms", "captures", "restores"], &[]),
    // The whole suite of backends takes long there: `--filter the_suite_with_incremental_dumps` runs it.
    ("crab-backend-criu", &["lib", "sandboxes-main"], &["precopy::", "no_store_between", "an_incremental_dump"]),
    (
        "crab-inspector",
        &["conformance", "inspector"],
        &["the_inspector_keeps_the_rules", "probing", "rights_enough", "idle_server"],
    ),
    // One after another: each waits until nothing else writes.
    ("crab-inspector", &["matrix"], &["shows_on_btrfs"]),
    ("crab-inspector", &["matrix"], &["shows_on_ext4"]),
    (ON_ZFS, &["zfs"], &[]),
];

/// The package whose tests act on sandboxes.
const NEEDS_SANDBOXES: &str = "crab-backend-criu";

/// The package whose tests act on sandboxes on ZFS, by the program that is Crab's own process.
const ON_ZFS: &str = "crab-examples";
const DEMO: &str = "demo";

/// What tests need and the guest cannot build: the package, the source, and the name of the variable that tells where
/// it is.
const TOOLS: &[(&str, &str, &str)] = &[("crab-inspector", "crab-inspector/tests/mutate.c", "CRAB_TEST_MUTATE")];

/// More than it takes; a guest that hangs is ended.
const LIMIT: Duration = Duration::from_secs(60 * 60);
/// How a suite begins in the guest's output.
const MARK: &str = "crab-vm-suite ";

/// A built test program.
struct Program {
    package: &'static str,
    name: String,
    path: PathBuf,
    words: &'static [&'static str],
}

/// What became of one test program.
#[derive(Debug, Default)]
struct Suite {
    name: String,
    /// Its closing line, where it came to its end.
    result: Option<String>,
    failed: Vec<String>,
}

/// What became of all.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    suites: Vec<Suite>,
    /// What tests said that they skipped.
    pub(crate) skipped: Vec<String>,
    took: Duration,
}

impl Outcome {
    /// Whether every program came to its end without a failure.
    pub(crate) fn is_good(&self) -> bool {
        self.suites.iter().all(|suite| suite.result.as_ref().is_some_and(|r| r.starts_with("test result: ok")))
    }

    /// Tells it.
    pub(crate) fn print(&self) {
        let mut counts = [0_u64; 2];
        for suite in &self.suites {
            let result = suite.result.as_deref().unwrap_or("did not come to its end");
            println!("vm: {}: {}", suite.name, result.trim_start_matches("test result: "));
            for failed in &suite.failed {
                println!("vm:   FAILED {failed}");
            }
            counts[0] += number(result, " passed");
            counts[1] += number(result, " failed");
        }
        println!(
            "vm: {} passed and {} failed in {} test programs, in {} s",
            counts[0],
            counts[1],
            self.suites.len(),
            self.took.as_secs()
        );
        let mut skipped = self.skipped.clone();
        skipped.sort();
        skipped.dedup();
        for what in skipped {
            println!("vm:   skipped: {what}");
        }
    }
}

/// The number before a word of a closing line.
fn number(result: &str, word: &str) -> u64 {
    let before = result.split(word).next().filter(|before| before.len() < result.len()).unwrap_or_default();
    before.rsplit(' ').next().and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// Builds the tests, runs those that the filter lets through in one boot, and prints what they print.
pub(crate) fn run(image: &Image, filter: Option<&str>) -> Result<Outcome, String> {
    let begun = Instant::now();
    let (mut programs, mut test_filter) = (Vec::new(), None);
    // A filter that holds a package's name is about no other: the rest need not be built.
    let named = |package: &str| filter.is_some_and(|filter| filter.contains(package));
    let any_named = SUITES.iter().any(|(package, ..)| named(package));
    for (package, names, words) in SUITES.iter().filter(|(package, ..)| named(package) || !any_named) {
        let built = build(package, words)?;
        programs.extend(built.into_iter().filter(|program| names.contains(&program.name.as_str())));
    }
    if let Some(filter) = filter {
        let named = |program: &Program| {
            let name = format!("{}/{}", program.package, program.name);
            filter.split(',').any(|part| name.contains(part))
        };
        if programs.iter().any(named) {
            programs.retain(named);
        } else {
            test_filter = Some(filter);
        }
    }
    let share = share(&programs, test_filter)?;
    println!("vm: booting, with {} test programs", programs.len());
    let mut outcome = Outcome::default();
    let code = boot::boot(image, &share, LIMIT, |line| {
        if let Some(name) = line.strip_prefix(MARK) {
            outcome.suites.push(Suite { name: name.to_owned(), ..Suite::default() });
        } else if let Some(suite) = outcome.suites.last_mut() {
            if line.starts_with("test result: ") {
                suite.result = Some(line.to_owned());
            }
            if let Some(name) = line.strip_prefix("test ").and_then(|rest| rest.strip_suffix(" ... FAILED")) {
                suite.failed.push(name.to_owned());
            }
            if let Some(what) = line.trim_start().strip_prefix("skipped: ") {
                outcome.skipped.push(what.to_owned());
            }
        }
        println!("{line}");
    });
    let left = remove(&share);
    outcome.took = begun.elapsed();
    code?;
    left?;
    if outcome.suites.len() < programs.len() {
        return Err(format!("only {} of {} test programs were run", outcome.suites.len(), programs.len()));
    }
    Ok(outcome)
}

/// Builds a package's tests.
fn build(package: &'static str, words: &'static [&'static str]) -> Result<Vec<Program>, String> {
    let output = tasks::cargo()
        .args(["test", "--no-run", "--package", package])
        .stderr(Stdio::piped())
        .output()
        .map_err(|error| format!("cannot start cargo: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(format!("the tests of {package} cannot be built:\n{said}"));
    }
    Ok(said.lines().filter_map(executable).map(|(name, path)| Program { package, name, path, words }).collect())
}

/// The name and path of a test program in one line of cargo's.
fn executable(line: &str) -> Option<(String, PathBuf)> {
    let (what, path) = line.trim().strip_prefix("Executable ")?.strip_suffix(')')?.split_once(" (")?;
    let name = what.rsplit(' ').next()?.trim_start_matches("tests/").trim_end_matches(".rs");
    Some((name.trim_start_matches("src/").replace('/', "-"), path.into()))
}

/// What the guest runs: the programs, one after the other.
fn share(programs: &[Program], test_filter: Option<&str>) -> Result<PathBuf, String> {
    let first = programs.first().ok_or("there is nothing to run")?;
    let beside = first.path.parent().unwrap_or(Path::new("."));
    let mut lines = String::new();
    let mut files = Vec::new();
    for (package, source, variable) in TOOLS {
        if programs.iter().any(|program| program.package == *package) {
            files.push((compile(source, beside)?, (*variable).to_owned()));
            lines.push_str(&format!("export {variable}=/mnt/share/{variable}\n"));
        }
    }
    for (number, program) in programs.iter().enumerate() {
        if program.package == NEEDS_SANDBOXES && files.iter().all(|(_, name)| name != boot::INIT) {
            files.push(boot::init()?);
            lines.push_str(boot::SANDBOXES);
        }
        let mut environment = String::new();
        if program.package == ON_ZFS {
            // Cargo puts a package's programs one above its tests.
            files.push((beside.join("..").join(DEMO), DEMO.to_owned()));
            lines.push_str(boot::ZFS_SANDBOXES);
            environment = format!("{} CRAB_DEMO=/mnt/share/{DEMO} ", boot::ON_ZFS);
        }
        let file = format!("test-{number}");
        let words = test_filter.map_or(program.words.join(" "), |filter| format!("'{}'", filter.replace('\'', "")));
        lines.push_str(&format!(
            "echo '{MARK}{}/{}'\n{environment}/mnt/share/{file} --show-output --test-threads=6 {words}\n",
            program.package, program.name
        ));
        files.push((program.path.clone(), file));
    }
    let share = boot::share(beside, &files, &lines)?;
    if programs.iter().any(|program| program.package == ON_ZFS) {
        boot::pack_base(&share)?;
    }
    Ok(share)
}

/// Compiles a C program of the project.
fn compile(source: &str, into: &Path) -> Result<PathBuf, String> {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(source);
    let program = into.join("crab-vm-tool");
    let output = Command::new("cc")
        .args(["-O1", "-w", "-o"])
        .args([&program, &from])
        .output()
        .map_err(|error| format!("cannot start cc: {error}"))?;
    if output.status.success() {
        Ok(program)
    } else {
        Err(format!("{source} cannot be compiled:\n{}", String::from_utf8_lossy(&output.stderr)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_programs_are_read_off_what_cargo_says() {
        let (name, path) = executable("  Executable tests/conforms.rs (target/debug/deps/conforms-3613)").unwrap();
        assert_eq!((name.as_str(), path), ("conforms", PathBuf::from("target/debug/deps/conforms-3613")));
        assert_eq!(executable("  Executable unittests src/lib.rs (/t/a-1)").unwrap().0, "lib");
        assert_eq!(executable("  Executable tests/http/main.rs (/t/http-1)").unwrap().0, "http-main");
        assert_eq!(executable("   Compiling crab-core v0.1.0 (/x/crab-core)"), None);
    }

    #[test]
    fn a_program_without_a_closing_line_has_failed() {
        let good = "test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.2s";
        let suite = |result: Option<&str>| Suite { result: result.map(str::to_owned), ..Suite::default() };
        let outcome = |suites| Outcome { suites, ..Outcome::default() };
        assert!(outcome(vec![suite(Some(good))]).is_good());
        assert!(!outcome(vec![suite(Some(good)), suite(None)]).is_good());
        assert!(!outcome(vec![suite(Some("test result: FAILED. 2 passed; 1 failed"))]).is_good());
        assert_eq!((number(good, " passed"), number(good, " failed"), number("", " passed")), (3, 0, 0));
    }
}
