//! Which CRIU is taken, and that it is spoken to in its own terms.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crab_backend_criu::CriuBackend;
use crab_examples::sandbox::criu_binary;

use crate::support::lacking;

/// Opens a backend whose CRIU is a script that counts its runs, and says how many there were.
async fn runs_of_opening(directory: &Path, criu: &Path) -> usize {
    let count = directory.join("count");
    let _ = fs::remove_file(&count);
    let builder = CriuBackend::builder().images(directory.join("images")).capture_dir(directory.join("captures"));
    let backend = builder.binary(criu).open().await.unwrap();
    assert_eq!(backend.binary(), criu);
    fs::read_to_string(count).unwrap().lines().count()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_criu_is_tried_once_for_each_binary_and_kernel() {
    if lacking() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let criu = directory.path().join("criu");
    let write = |comment: &str| {
        let count = directory.path().join("count");
        let text =
            format!("#!/bin/sh\n# {comment}\necho >>{}\nexec {} \"$@\"\n", count.display(), criu_binary().display());
        fs::write(&criu, text).unwrap();
        fs::set_permissions(&criu, fs::Permissions::from_mode(0o755)).unwrap();
    };
    write("one");
    // It tells its version, and dumps.
    assert_eq!(runs_of_opening(directory.path(), &criu).await, 2);
    assert_eq!(runs_of_opening(directory.path(), &criu).await, 1, "the trial is remembered");
    write("another one");
    assert_eq!(runs_of_opening(directory.path(), &criu).await, 2, "it is another binary");
    assert_eq!(runs_of_opening(directory.path(), &criu).await, 1);
    let noted = directory.path().join("captures/self-test.json");
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let text = fs::read_to_string(&noted).unwrap();
    assert!(text.contains(release.trim()));
    fs::write(&noted, text.replace(release.trim(), "5.10.0-other")).unwrap();
    assert_eq!(runs_of_opening(directory.path(), &criu).await, 2, "that was another kernel");
}

/// The messages of a program that were made by protobuf-c: name and number of each field.
fn described(program: &[u8]) -> BTreeMap<String, BTreeMap<String, u32>> {
    let number = |at: usize, size: usize| {
        let bytes = program.get(at..at + size)?;
        Some(bytes.iter().rev().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte)))
    };
    let word = |at: usize| Some(number(at, 8)? as usize);
    // Parts of the file: (where, in memory, how long) and, of type 2, what tells of the relocations.
    let (table, count) = (word(32).unwrap(), number(56, 2).unwrap() as usize);
    let parts: Vec<[usize; 4]> = (0..count)
        .map(|n| table + n * 56)
        .map(|at| {
            [number(at, 4).unwrap() as usize, word(at + 8).unwrap(), word(at + 16).unwrap(), word(at + 32).unwrap()]
        })
        .collect();
    let place = |address: usize| {
        let part =
            parts.iter().find(|[kind, _, start, size]| *kind == 1 && (*start..start + size).contains(&address))?;
        Some(address - part[2] + part[1])
    };
    let dynamic = parts.iter().find(|part| part[0] == 2).unwrap();
    let tags: BTreeMap<usize, usize> = (0..dynamic[3] / 16)
        .map(|n| dynamic[1] + 16 * n)
        .map(|at| (word(at).unwrap(), word(at + 8).unwrap()))
        .collect();
    // Where a pointer will be, and what to.
    let relocations = place(tags[&7]).unwrap();
    let pointers: BTreeMap<usize, usize> = (0..tags[&8] / 24)
        .map(|n| relocations + 24 * n)
        .filter(|at| number(at + 8, 8) == Some(8))
        .map(|at| (word(at).unwrap(), word(at + 16).unwrap()))
        .collect();
    let text = |address: &usize| {
        let from = program.get(place(*address)?..)?;
        Some(String::from_utf8_lossy(from.split(|byte| *byte == 0).next()?).into_owned())
    };
    let mut found = BTreeMap::new();
    for address in pointers.keys().map(|field| field - 8) {
        let Some(at) = place(address).filter(|at| number(*at, 4) == Some(0x28aa_eef9)) else { continue };
        let fields = number(at + 48, 4).unwrap() as usize;
        let (Some(name), Some(first)) = (text(&pointers[&(address + 8)]), pointers.get(&(address + 56))) else {
            continue;
        };
        let field = |n: usize| {
            let field = first + n * 72;
            Some((text(pointers.get(&field)?)?, number(place(field)? + 8, 4)? as u32))
        };
        found.insert(name, (0..fields).filter_map(field).collect());
    }
    found
}

#[test]
fn the_messages_are_those_of_the_installed_criu() {
    if lacking() {
        return;
    }
    let criu = described(&fs::read(criu_binary()).unwrap());
    let ours = include_str!("../../src/proto.rs");
    let (mut message, mut tag, mut compared) = (None, None, 0);
    for line in ours.lines().map(str::trim) {
        let quoted =
            |line: &str, before: &str, after: char| Some(line.split_once(before)?.1.split(after).next()?.to_owned());
        if line.starts_with("/// `") {
            message = quoted(line, "/// `", '`').filter(|name| criu.contains_key(name)).or(message);
        } else if line.starts_with("#[prost(") {
            tag = quoted(line, "tag = \"", '"').map(|tag| tag.parse::<u32>().unwrap());
        } else if let (Some(number), Some(name)) = (tag, quoted(line, "pub(crate) ", ':')) {
            let name = match name.as_str() {
                "kind" => "type",
                "major" => "major_number",
                "minor" => "minor_number",
                name => name,
            };
            let message = message.clone().unwrap();
            assert_eq!(criu[&message].get(name), Some(&number), "{name} of {message}");
            (tag, compared) = (None, compared + 1);
        }
    }
    assert!(compared > 40, "{compared} fields were compared");
}
