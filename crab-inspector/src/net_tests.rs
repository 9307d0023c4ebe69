//! The comparison against states in memory: whatever is done to one, it says what a restore would notice.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

const ROOT: u64 = 256;
const SINCE: u64 = 100;

#[derive(Clone)]
struct Node {
    inode: Inode,
    body: Body,
    bytes: Vec<u8>,
}

#[derive(Clone)]
struct State {
    nodes: BTreeMap<u64, Node>,
    next: u64,
    clock: u64,
}

impl State {
    fn new() -> Self {
        let mut state = Self { nodes: BTreeMap::new(), next: ROOT, clock: 1 };
        state.make(0o040_755);
        state
    }

    fn time(&self) -> Stamp {
        Stamp { seconds: self.clock.cast_signed(), nanoseconds: 0 }
    }

    fn make(&mut self, mode: u32) -> u64 {
        let number = self.next;
        self.next += 1;
        self.clock += 1;
        let now = self.time();
        let inode = Inode {
            born: self.clock,
            touched: self.clock,
            size: 0,
            links: 1,
            uid: 0,
            gid: 0,
            mode,
            kind: Kind::of_mode(mode),
            device: 0,
            flags: 0,
            modified: now,
            changed: now,
            made: now,
        };
        let node = Node { inode, body: Body::default(), bytes: Vec::new() };
        self.nodes.insert(number, node);
        number
    }

    fn touch(&mut self, number: u64, modified: bool) -> &mut Node {
        self.clock += 1;
        let (now, clock) = (self.time(), self.clock);
        let node = self.nodes.get_mut(&number).unwrap();
        node.inode.touched = clock;
        node.inode.changed = now;
        if modified {
            node.inode.modified = now;
        }
        node
    }

    fn folders(&self) -> Vec<u64> {
        let mut folders = vec![ROOT];
        let mut at = 0;
        while let Some(folder) = folders.get(at) {
            let entries = self.nodes[folder].body.entries.values();
            folders.extend(
                entries.map(|entry| entry.inode).filter(|inode| self.nodes[inode].inode.kind == Kind::Directory),
            );
            at += 1;
        }
        folders
    }

    /// Does something, as numbers say; what makes no sense does nothing.
    fn step(&mut self, (what, which, name, value): (u8, usize, u8, u8)) {
        let folders = self.folders();
        let folder = folders[which % folders.len()];
        let name = vec![b'a' + name % 4];
        let found = self.nodes[&folder].body.entries.get(&name).copied();
        match (what % 8, found) {
            (0, None) | (1, None) => {
                let mode = if what.is_multiple_of(8) { 0o100_644 } else { 0o040_755 };
                let inode = self.make(mode);
                let entry = Entry { inode, foreign: false };
                self.touch(folder, true).body.entries.insert(name, entry);
            }
            (2, Some(entry)) if self.nodes[&entry.inode].body.entries.is_empty() => {
                self.touch(folder, true).body.entries.remove(&name);
                self.nodes.remove(&entry.inode);
            }
            (3 | 4, Some(entry)) if self.nodes[&entry.inode].inode.kind == Kind::File => {
                let node = self.touch(entry.inode, true);
                node.bytes = vec![value % 3; usize::from(value % 3)];
                node.inode.size = node.bytes.len() as u64;
                node.body.extents.clear();
                if !node.bytes.is_empty() {
                    let extent =
                        Extent { written: node.inode.touched, place: node.inode.touched.to_le_bytes().to_vec() };
                    node.body.extents.insert(0, extent);
                }
            }
            (5, Some(entry)) => {
                let node = self.touch(entry.inode, false);
                node.inode.mode = node.inode.mode & !0o7 | u32::from(value % 2);
            }
            (6, Some(entry)) => {
                // A rename within the folder, over nothing.
                let to = vec![b'a' + value % 4];
                if !self.nodes[&folder].body.entries.contains_key(&to) {
                    self.touch(entry.inode, false);
                    let node = self.touch(folder, true);
                    node.body.entries.remove(&name);
                    node.body.entries.insert(to, entry);
                }
            }
            (7, Some(entry)) => {
                let node = self.touch(entry.inode, false);
                node.body.attributes.insert(b"user.x".to_vec(), vec![value % 2]);
            }
            _ => {}
        }
    }

    /// All that a restore brings back, but the times.
    #[allow(clippy::type_complexity)]
    fn visible(&self) -> BTreeMap<Vec<u8>, (u32, Vec<u8>, BTreeMap<Vec<u8>, Vec<u8>>)> {
        let mut visible = BTreeMap::new();
        let mut left = vec![(Vec::new(), ROOT)];
        while let Some((path, number)) = left.pop() {
            let node = &self.nodes[&number];
            for (name, entry) in &node.body.entries {
                left.push(([&path[..], b"/", name].concat(), entry.inode));
            }
            let what = (node.inode.mode, node.bytes.clone(), node.body.attributes.clone());
            visible.insert(path, what);
        }
        visible
    }

    fn file_times(&self) -> BTreeMap<Vec<u8>, Stamp> {
        let mut times = BTreeMap::new();
        let mut left = vec![(Vec::new(), ROOT)];
        while let Some((path, number)) = left.pop() {
            let node = &self.nodes[&number];
            for (name, entry) in &node.body.entries {
                left.push(([&path[..], b"/", name].concat(), entry.inode));
            }
            if node.inode.kind == Kind::File {
                times.insert(path, node.inode.modified);
            }
        }
        times
    }
}

struct Both {
    old: State,
    new: State,
}

impl Pair for Both {
    fn inode(&mut self, side: Side, number: u64) -> io::Result<Option<Inode>> {
        let state = if side == Side::Old { &self.old } else { &self.new };
        Ok(state.nodes.get(&number).map(|node| node.inode.clone()))
    }

    fn body(&mut self, side: Side, number: u64) -> io::Result<Option<Body>> {
        let state = if side == Side::Old { &self.old } else { &self.new };
        Ok(state.nodes.get(&number).map(|node| node.body.clone()))
    }

    fn same_bytes(&mut self, new: u64, old: u64, _: u64) -> io::Result<bool> {
        Ok(self.new.nodes[&new].bytes == self.old.nodes[&old].bytes)
    }
}

const AMPLE: Limits = Limits { inodes: 10_000, bytes: 1 << 20 };

type Step = (u8, usize, u8, u8);

fn states(before: Vec<Step>, after: Vec<Step>) -> Both {
    let mut old = State::new();
    for step in before {
        old.step(step);
    }
    let mut new = old.clone();
    new.clock = new.clock.max(SINCE);
    for step in after {
        new.step(step);
    }
    Both { old, new }
}

fn difference(both: &mut Both, limits: Limits) -> Result<Difference, Stop> {
    let since = Since { transaction: SINCE, time: Stamp { seconds: SINCE.cast_signed(), nanoseconds: 0 } };
    let touched: Vec<u64> =
        both.new.nodes.iter().filter(|(_, node)| node.inode.touched > SINCE).map(|(number, _)| *number).collect();
    compare(both, since, &touched, limits)
}

fn steps(most: usize) -> impl Strategy<Value = Vec<Step>> {
    proptest::collection::vec(any::<Step>(), 0..most)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn what_a_restore_would_notice_differs(before in steps(40), after in steps(12)) {
        let mut both = states(before, after);
        // Few enough steps before, so that all of them are older than the line.
        prop_assume!(both.old.clock < SINCE);
        let found = difference(&mut both, AMPLE).unwrap();
        if both.old.visible() != both.new.visible() {
            prop_assert!(!found.is_empty());
        } else if both.old.file_times() == both.new.file_times() {
            prop_assert!(found.is_empty(), "{found:?}");
        }
    }

    #[test]
    fn limits_never_hide_a_difference(before in steps(40), after in steps(12), inodes in 0usize..8, bytes in 0u64..4) {
        let mut both = states(before, after);
        prop_assume!(both.old.clock < SINCE);
        if both.old.visible() != both.new.visible()
            && let Ok(found) = difference(&mut both, Limits { inodes, bytes })
        {
            prop_assert!(!found.is_empty());
        }
    }
}
