package histories

import (
	"strings"
	"testing"
)

// at makes a request that lasts from call to back.
func at(call, back int64, op Op) Op {
	op.Key, op.Node, op.Call, op.Return = "k", "a", call, back
	if op.Outcome == "" {
		op.Outcome = Done
	}
	if op.Cas == 0 {
		op.Cas = uint64(op.Writes + op.Found)
	}
	return op
}

func set(version Version) Op           { return Op{Kind: Set, Writes: version} }
func add(version Version) Op           { return Op{Kind: Add, Writes: version} }
func swap(expects, version Version) Op { return Op{Kind: Swap, Expects: expects, Writes: version} }
func remove() Op                       { return Op{Kind: Delete} }
func get(version Version) Op           { return Op{Kind: Get, Found: version} }
func (op Op) ends(outcome Outcome) Op  { op.Outcome = outcome; return op }
func (op Op) outOfOffice() Op          { op.IsStale = true; return op }
func (op Op) missing() Op              { op.Outcome, op.Missing = Refused, true; return op }
func (op Op) withCas(cas uint64) Op    { op.Cas = cas; return op }
func oneAfterTheOther(ops ...Op) (all []Op) {
	for n, op := range ops {
		all = append(all, at(int64(10*n), int64(10*n+5), op))
	}
	return all
}

func TestHistoriesThatHaveAnOrderPass(t *testing.T) {
	for name, history := range map[string][]Op{
		"one after the other":                   oneAfterTheOther(get(0), set(1), get(1), swap(1, 2), get(2), remove(), get(0), add(3), get(3)),
		"conditions":                            oneAfterTheOther(swap(9, 1).missing(), set(2), add(3).ends(Refused), swap(9, 4).ends(Refused), get(2)),
		"an ambiguous write that never was":     oneAfterTheOther(set(1), set(2).ends(Ambiguous), get(1), get(1)),
		"an ambiguous write that came late":     oneAfterTheOther(set(1), set(2).ends(Ambiguous), get(1), get(2), get(2)),
		"an ambiguous swap that came too late":  oneAfterTheOther(set(1), swap(1, 2).ends(Ambiguous), set(3), get(3)),
		"an ambiguous delete that came late":    oneAfterTheOther(set(1), remove().ends(Ambiguous), get(1), get(0)),
		"a write under way is seen or not":      {at(0, 5, set(1)), at(10, 90, set(2)), at(20, 30, get(1)), at(40, 50, get(2))},
		"what one out of office says is stale":  oneAfterTheOther(set(1), set(2), get(1).outOfOffice(), get(2)),
		"what one out of office refuses is too": oneAfterTheOther(set(1), remove(), add(2).ends(Refused).outOfOffice(), get(0)),
	} {
		if err := Check(history); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestHistoriesThatHaveNoOrderAreFound(t *testing.T) {
	for name, history := range map[string][]Op{
		"a lost write":                                 oneAfterTheOther(set(1), set(2), get(1)),
		"a lost first write":                           oneAfterTheOther(set(1), get(0)),
		"a lost delete":                                oneAfterTheOther(set(1), remove(), get(1)),
		"a lost write, by what an add was told":        oneAfterTheOther(set(1), add(2)),
		"a lost write, by what a swap was told":        oneAfterTheOther(set(1), set(2), swap(1, 3)),
		"a stale read":                                 {at(0, 50, set(1)), at(60, 90, set(2)), at(70, 75, get(2)), at(80, 85, get(1))},
		"two swaps of one version":                     {at(0, 5, set(1)), at(10, 90, swap(1, 2)), at(10, 90, swap(1, 3))},
		"a failed write that was done":                 oneAfterTheOther(set(1), set(2).ends(Failed), get(2)),
		"a version from nowhere":                       oneAfterTheOther(set(1), get(7)),
		"a version from nowhere, at one out of office": oneAfterTheOther(set(1), get(7).outOfOffice()),
		"a version from the future":                    oneAfterTheOther(get(1).outOfOffice(), set(1)),
		"an ambiguous write that was done twice":       oneAfterTheOther(set(1), set(2).ends(Ambiguous), get(2), set(3), get(2)),
		"an ambiguous write that went away again":      oneAfterTheOther(set(1), set(2).ends(Ambiguous), get(2), get(1)),
		"a write acknowledged by one out of office":    oneAfterTheOther(set(1), set(2).outOfOffice(), get(1)),
		"an answer that was not so":                    oneAfterTheOther(set(1), add(2).ends(Refused), remove(), add(3).ends(Refused)),
		"one version with two CAS":                     oneAfterTheOther(set(1).withCas(4), get(1).withCas(5)),
		"one out of office goes back":                  oneAfterTheOther(set(1), set(2), get(2).outOfOffice(), get(1).outOfOffice()),
	} {
		if Check(history) == nil {
			t.Errorf("%s passed", name)
		}
	}
}

func TestWhatIsWrongIsShownWithTheAnswersOfItsKey(t *testing.T) {
	err := Check(oneAfterTheOther(set(1), set(2), get(1)))
	if err == nil || !strings.Contains(err.Error(), "k: no order") || !strings.Contains(err.Error(), "set(2)") {
		t.Errorf("%v", err)
	}
}
