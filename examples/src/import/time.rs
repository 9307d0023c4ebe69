//! Times as the agents write them: `2026-03-01T10:00:04.500Z`.

use serde_json::Value;

/// Milliseconds since 1970; nothing where it is not such a time.
pub(super) fn milliseconds(value: &Value) -> Option<i64> {
    let (date, time) = value.as_str()?.strip_suffix('Z')?.split_once('T')?;
    let numbers = |text: &str, sign| text.split(sign).map(|part| part.parse::<i64>().ok()).collect::<Option<Vec<_>>>();
    let (time, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let [year, month, day] = numbers(date, '-')?.try_into().ok()?;
    let [hour, minute, second] = numbers(time, ':')?.try_into().ok()?;
    let thousandths: i64 = format!("{fraction:0<3}").get(..3)?.parse().ok()?;
    // Days by the count of years that begin in March: Howard Hinnant, "chrono-compatible low-level date algorithms".
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let day_of_year = (153 * month + 2) / 5 + day - 1;
    let days = era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + day_of_year - 719_468;
    Some((((days * 24 + hour) * 60 + minute) * 60 + second) * 1000 + thousandths)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_times_are_right_and_others_are_none() {
        let at = |text: &str| milliseconds(&Value::from(text));
        assert_eq!(at("1970-01-01T00:00:00Z"), Some(0));
        assert_eq!(at("2024-02-29T12:00:00.25Z"), Some(1_709_208_000_250));
        assert_eq!(at("2000-03-01T00:00:00.000Z"), Some(951_868_800_000));
        for bad in ["", "yesterday", "2024-02-29", "2024-02-29T12:00Z", "2024-02-29T12:00:00+01:00"] {
            assert_eq!(at(bad), None, "{bad}");
        }
    }
}
